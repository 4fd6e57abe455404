// Damaged payloads through the CPU decoders, to be built with sanitizers (payloads.py does so).
//
//   damage run CODEC SEED FIRST COUNT STATE   cases FIRST .. FIRST + COUNT - 1; where it stands is
//                                             written to STATE, so that a crash has a number
//   damage dump CODEC SEED INDEX FILE         one case as a file
//   damage replay FILE                        decodes what such a file holds
//
// Payload and result lie in buffers of exactly their length. Exit status 1: an answer was wrong.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "mutate.h"

// Of the sanitizers' runtime; g++ does not install its header everywhere.
extern "C" int __sanitizer_install_malloc_and_free_hooks(
    void (*malloc_hook)(const volatile void*, size_t), void (*free_hook)(const volatile void*));

namespace damage {
namespace {

constexpr size_t MESSAGES = 512;
// what an exception and its text may take beside 16 times the payload
constexpr size_t WORDS_NBYTES = 1024;

struct State {
    u64 index, decoded, refused, largest;  // largest: allocated by one call, in 1/16 of its payload
};

size_t allocated = 0;
bool watching = false;
void on_malloc(const volatile void*, size_t size) {
    if (watching) allocated += size;
}
void on_free(const volatile void*) {}

struct Block {  // of exactly `size` bytes from `offset` on; null for none, as an empty tensor
    u8 *whole, *bytes;
    explicit Block(size_t size, size_t offset = 0)
        : whole(size ? (u8*)malloc(offset + size) : nullptr),
          bytes(whole ? whole + offset : nullptr) {}
    ~Block() { free(whole); }
};

const Codec& codec_of(const std::vector<Codec>& all, const std::string& name) {
    for (const Codec& codec : all) {
        if (name == codec.name) return codec;
    }
    fprintf(stderr, "damage: no codec %s was built in\n", name.c_str());
    exit(2);
}

// Decodes one case; false where that gave a wrong answer. `refusal`: what was said of the payload.
bool decode(const Codec& codec, const Case& one, std::string& refusal, size_t& used) {
    size_t room = (one.call.add ? 4 : item_bytes(one.call.target)) * one.call.numel;
    // payloads may begin anywhere: one in four begins where a word does not
    size_t place = (one.payload.size() / 16 * 7 + one.call.numel) % 64;
    Block in(one.payload.size(), place < 16 ? place : 0), out(room);
    if (!one.payload.empty()) memcpy(in.bytes, one.payload.data(), one.payload.size());
    if (room) memset(out.bytes, 0, room);
    refusal.clear();
    if (codec.prepare) codec.prepare(one.call);
    allocated = 0, watching = true;
    try {
        codec.decode(one.call, in.bytes, one.payload.size(), out.bytes);
        watching = false;
    } catch (const std::invalid_argument& error) {
        watching = false;
        refusal = error.what();
    }
    used = allocated - std::min(allocated, codec.tables);
    if (one.whole && !refusal.empty()) {
        fprintf(stderr, "damage: a whole payload was refused: %s\n", refusal.c_str());
        return false;
    }
    if (used > 16 * one.payload.size() + WORDS_NBYTES) {
        fprintf(stderr, "damage: %zu bytes allocated for a payload of %zu\n", used,
                one.payload.size());
        return false;
    }
    return true;
}

State* state_at(const char* path) {
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(State))) perror(path), exit(2);
    void* memory = mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) perror(path), exit(2);
    return (State*)memory;
}

int run(const Codec& codec, u64 seed, u64 first, u64 count, State* state) {
    std::vector<Message> messages = bank(codec, seed, MESSAGES);
    std::string refusal;
    for (u64 index = first; index < first + count; ++index) {
        state->index = index;
        Case one = make_case(codec, messages, seed, index);
        size_t used = 0;
        if (!decode(codec, one, refusal, used)) return 1;
        ++(refusal.empty() ? state->decoded : state->refused);
        if (refusal.empty() && !one.payload.empty()) {
            state->largest = std::max<u64>(state->largest, 16 * used / one.payload.size());
        }
    }
    state->index = first + count;
    return 0;
}

void dump(const Codec& codec, u64 seed, u64 index, const char* path) {
    Case one = make_case(codec, bank(codec, seed, MESSAGES), seed, index);
    const Call& c = one.call;
    u32 bound;
    memcpy(&bound, &c.bound, 4);
    std::ofstream file(path, std::ios::binary);
    file << "hybridcomp-damaged-payload 1 " << codec.name << ' ' << c.setting << ' ' << c.relative
         << ' ' << c.dtype << ' ' << c.target << ' ' << c.add << ' ' << bound << ' ' << c.numel
         << ' ' << one.whole << '\n';
    file.write((const char*)one.payload.data(), (std::streamsize)one.payload.size());
}

int replay(const std::vector<Codec>& all, const char* path) {
    std::ifstream file(path, std::ios::binary);
    std::string line, magic, name;
    std::getline(file, line);
    std::istringstream words(line);
    int version = 0;
    u32 bound = 0;
    Case one{};
    Call& c = one.call;
    words >> magic >> version >> name >> c.setting >> c.relative >> c.dtype >> c.target >> c.add >>
        bound >> c.numel >> one.whole;
    if (!words || magic != "hybridcomp-damaged-payload" || version != 1) {
        fprintf(stderr, "damage: %s holds no damaged payload\n", path);
        return 2;
    }
    memcpy(&c.bound, &bound, 4);
    std::ostringstream rest;
    rest << file.rdbuf();
    std::string bytes = rest.str();
    one.payload.assign(bytes.begin(), bytes.end());
    std::string refusal;
    size_t used = 0;
    bool good = decode(codec_of(all, name), one, refusal, used);
    printf("%s: %s\n", path, refusal.empty() ? "decoded" : ("refused: " + refusal).c_str());
    return good ? 0 : 1;
}

}  // namespace
}  // namespace damage

int main(int argc, char** argv) {
    using namespace damage;
    __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);
    std::vector<Codec> all = codecs();
    std::string what = argc > 1 ? argv[1] : "";
    auto number = [&](int at) { return strtoull(argv[at], nullptr, 10); };
    if (what == "run" && argc == 7) {
        return run(codec_of(all, argv[2]), number(3), number(4), number(5), state_at(argv[6]));
    }
    if (what == "dump" && argc == 6) {
        dump(codec_of(all, argv[2]), number(3), number(4), argv[5]);
        return 0;
    }
    if (what == "replay" && argc == 3) return replay(all, argv[2]);
    fprintf(stderr, "usage: damage run|dump|replay ..., see damage.cpp\n");
    return 2;
}
