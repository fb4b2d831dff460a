/* A mount without locks, as NFS without its lock service: every lock fails with ENOLCK. And each
 * answer to link() is lost: the second try, which the client makes by itself, finds the name there.
 * Below LOCKLESS_UNDER only; how often it came to that is in the size of the file LOCKLESS_SEEN.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_below(const char *path) {
    const char *folder = getenv("LOCKLESS_UNDER");
    return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int is_file_below(int descriptor) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_below(path);
}

static int refuse(char what, int error) {
    const char *seen = getenv("LOCKLESS_SEEN");
    int file = seen ? open(seen, O_WRONLY | O_CREAT | O_APPEND, 0644) : -1;
    if (file >= 0) {
        ssize_t written = write(file, &what, 1);
        (void)written;
        close(file);
    }
    errno = error;
    return -1;
}

int flock(int descriptor, int operation) {
    static int (*real)(int, int);
    if (!real) real = (int (*)(int, int))dlsym(RTLD_NEXT, "flock");
    return is_file_below(descriptor) ? refuse('l', ENOLCK) : real(descriptor, operation);
}

int link(const char *from, const char *to) {
    static int (*real)(const char *, const char *);
    if (!real) real = (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "link");
    int done = real(from, to);
    return done == 0 && is_below(to) ? refuse('a', EEXIST) : done;
}

int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags) {
    static int (*real)(int, const char *, int, const char *, int);
    if (!real) real = (int (*)(int, const char *, int, const char *, int))dlsym(RTLD_NEXT, "linkat");
    int done = real(from_dir, from, to_dir, to, flags);
    return done == 0 && is_below(to) ? refuse('a', EEXIST) : done;
}

static int is_lock(int command) {
    return command == F_SETLK || command == F_SETLKW || command == F_GETLK ||
           command == F_OFD_SETLK || command == F_OFD_SETLKW || command == F_OFD_GETLK;
}

#define FCNTL(name)                                                        \
    int name(int descriptor, int command, ...) {                           \
        static int (*real)(int, int, void *);                              \
        if (!real) real = (int (*)(int, int, void *))dlsym(RTLD_NEXT, #name); \
        va_list rest;                                                      \
        va_start(rest, command);                                           \
        void *argument = va_arg(rest, void *);                             \
        va_end(rest);                                                      \
        if (is_lock(command) && is_file_below(descriptor)) return refuse('l', ENOLCK); \
        return real(descriptor, command, argument);                        \
    }
FCNTL(fcntl)
FCNTL(fcntl64)
