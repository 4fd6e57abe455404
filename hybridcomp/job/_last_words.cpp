// hybridcomp._last_words: what a rank says when its launcher ends it (SIGTERM) or it aborts (SIGABRT).
//
// When one rank is killed its launcher ends the others within a second, often before they have noticed
// anything, and names no rank. NCCL's watchdog aborts. Python's own handlers run between two byte codes, so
// never while a rank waits in a collective; this one runs at once, on Linux. It looks at the processes of
// the other ranks of this host and says which has ended or is stopped, then the signal acts as before.
// Only calls that a signal handler may make: open, read, write, and functions of strings.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include <initializer_list>

#include <fcntl.h>
#include <unistd.h>

namespace {

constexpr int MOST = 64, NAME = 160;

struct Peer {
    char path[32];  // /proc/<pid>/stat
    char began[24];
    char name[NAME];  // rank 1 (process 12 on host)
};
Peer peers[MOST];
int count = 0;
pid_t mine = 0;
char me[NAME];

struct Text {
    char bytes[4096];
    size_t length = 0;
    void add(const char* more) {
        while (*more && length < sizeof bytes) bytes[length++] = *more++;
    }
};

// What is wrong with a peer, null where nothing is.
const char* state_of(const Peer& peer) {
    int file = open(peer.path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return "has ended";
    char text[1024];
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0) return "has ended";
    text[size] = 0;
    char* at = strrchr(text, ')');  // behind the name of the program
    if (!at || at[1] != ' ') return nullptr;
    char state = at[2];
    if (state == 'Z' || state == 'X' || state == 'x') return "has ended";
    // field 22 is when it began: another process may have its number by now
    at += 2;
    for (int field = 3; field < 22 && at; ++field) {
        at = strchr(at, ' ');
        if (at) ++at;
    }
    size_t length = strlen(peer.began);
    if (length && at && (strncmp(at, peer.began, length) != 0 || at[length] != ' ')) {
        return "has ended";
    }
    return state == 'T' || state == 't' ? "is stopped (SIGSTOP, or a debugger)" : nullptr;
}

void say(int number) {
    Text text;
    text.add("[hybridcomp] ");
    text.add(me);
    text.add(number == SIGTERM ? " was told to end (SIGTERM): " : " aborts: ");
    bool any = false;
    for (int i = 0; i < count; ++i) {
        const char* state = state_of(peers[i]);
        if (!state) continue;
        if (any) text.add("; ");
        any = true;
        text.add(peers[i].name);
        text.add(" ");
        text.add(state);
    }
    if (!any) text.add("no other rank of this host is missing");
    text.add("\n");
    if (write(2, text.bytes, text.length) < 0) return;
}

void on_signal(int number) {
    int before = errno;
    if (getpid() == mine) say(number);  // not in a forked child, such as a worker of a data loader
    signal(number, SIG_DFL);
    raise(number);
    errno = before;
}

bool copy(char* target, size_t room, const char* source) {
    size_t length = strlen(source);
    if (length >= room) return false;
    memcpy(target, source, length + 1);
    return true;
}

// set(me: str, peers: list[tuple[path, began, name]]): the handlers are taken where nobody has them.
PyObject* set(PyObject*, PyObject* arguments) {
    const char* own;
    PyObject* list;
    if (!PyArg_ParseTuple(arguments, "sO!", &own, &PyList_Type, &list)) return nullptr;
    if (!copy(me, sizeof me, own)) return PyErr_Format(PyExc_ValueError, "too long: %s", own);
    int next = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list) && next < MOST; ++i) {
        const char *path, *began, *name;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "sss", &path, &began, &name)) return nullptr;
        Peer& peer = peers[next];
        if (copy(peer.path, sizeof peer.path, path) && copy(peer.began, sizeof peer.began, began) &&
            copy(peer.name, sizeof peer.name, name)) {
            ++next;
        }
    }
    count = next;
    mine = getpid();
    for (int number : {SIGTERM, SIGABRT}) {
        struct sigaction found;
        if (sigaction(number, nullptr, &found) != 0) return PyErr_SetFromErrno(PyExc_OSError);
        if ((found.sa_flags & SA_SIGINFO) || found.sa_handler != SIG_DFL) continue;
        struct sigaction ours = {};
        ours.sa_handler = on_signal;
        ours.sa_flags = SA_NODEFER;
        sigemptyset(&ours.sa_mask);
        if (sigaction(number, &ours, nullptr) != 0) return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

PyMethodDef METHODS[] = {
    {"set", set, METH_VARARGS, "set(me, peers): say who is missing when a signal ends this rank."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_last_words", nullptr, -1, METHODS,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__last_words() { return PyModule_Create(&MODULE); }
