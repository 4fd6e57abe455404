// The functions of AMD's runtime that launch.cpp asks for. What they are called with goes to `seen`.
#include <cstring>

namespace {
int device = 1;
}

extern "C" {

unsigned long long seen[24];
int fails = 0, words = 0, table_words = 0;

int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                          void* stream, void** arguments, void** extra) {
    unsigned long long head[] = {(unsigned long long)function, grid_x, grid_y, grid_z, block_x, block_y,
                                 block_z, shared, (unsigned long long)stream,
                                 (unsigned long long)device, (unsigned long long)extra};
    memcpy(seen, head, sizeof head);
    unsigned long long* to = seen + 11;
    if (table_words) memcpy(to, arguments[0], 8 * table_words), to += table_words, ++arguments;
    for (int i = 0; i < words; ++i) memcpy(to + i, arguments[i], 8);
    return fails;
}
int hipGetDevice(int* current) {
    *current = device;
    return 0;
}
int hipSetDevice(int wanted) {
    if (wanted > 1) return 101;
    device = wanted;
    return 0;
}
const char* hipGetErrorString(int) { return "made up"; }
}
