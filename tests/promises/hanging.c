/* Storage that hangs, as a mount whose server is away does: every call on a path or a descriptor
   below $HANG_UNDER waits for as long as the file $HANG_WHILE is there. To be preloaded. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int hangs(void) {
    const char *flag = getenv("HANG_WHILE");
    return flag && syscall(SYS_faccessat, AT_FDCWD, flag, F_OK) == 0;
}

static int is_below(const char *path) {
    const char *folder = getenv("HANG_UNDER");
    size_t length = folder ? strlen(folder) : 0;
    return length && path && strncmp(path, folder, length) == 0 &&
           (path[length] == '/' || path[length] == 0);
}

/* Says, by the file $HANG_WHILE.PID, that this process waits. */
static void say_so(void) {
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s.%d", getenv("HANG_WHILE"), getpid());
    int fd = syscall(SYS_openat, AT_FDCWD, name, O_CREAT | O_WRONLY, 0600);
    if (fd >= 0) syscall(SYS_close, fd);
}

static void wait_for(const char *path) {
    const struct timespec tick = {0, 10 * 1000 * 1000};
    if (is_below(path) && hangs()) say_so();
    while (is_below(path) && hangs()) nanosleep(&tick, NULL);
}

static void wait_fd(int fd) {
    char name[64], path[PATH_MAX];
    if (!hangs()) return;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, name, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    wait_for(path);
}

static void wait_at(int fd, const char *path) {
    if (path && path[0] == '/') wait_for(path);
    else if (fd != AT_FDCWD) wait_fd(fd);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRAP(kind, name, params, args, waits) \
    kind name params { waits; return NEXT(name) args; }

WRAP(ssize_t, read, (int fd, void *to, size_t n), (fd, to, n), wait_fd(fd))
WRAP(ssize_t, pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at), wait_fd(fd))
WRAP(ssize_t, pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at), wait_fd(fd))
WRAP(ssize_t, write, (int fd, const void *of, size_t n), (fd, of, n), wait_fd(fd))
WRAP(ssize_t, pwrite, (int fd, const void *of, size_t n, off_t at), (fd, of, n, at), wait_fd(fd))
WRAP(ssize_t, pwrite64, (int fd, const void *of, size_t n, off64_t at), (fd, of, n, at), wait_fd(fd))
WRAP(ssize_t, writev, (int fd, const struct iovec *of, int n), (fd, of, n), wait_fd(fd))
WRAP(int, fsync, (int fd), (fd), wait_fd(fd))
WRAP(int, fdatasync, (int fd), (fd), wait_fd(fd))
WRAP(int, ftruncate, (int fd, off_t n), (fd, n), wait_fd(fd))
WRAP(int, ftruncate64, (int fd, off64_t n), (fd, n), wait_fd(fd))
WRAP(int, fstat, (int fd, struct stat *to), (fd, to), wait_fd(fd))
WRAP(int, fstat64, (int fd, struct stat64 *to), (fd, to), wait_fd(fd))
WRAP(int, stat, (const char *path, struct stat *to), (path, to), wait_for(path))
WRAP(int, stat64, (const char *path, struct stat64 *to), (path, to), wait_for(path))
WRAP(int, lstat, (const char *path, struct stat *to), (path, to), wait_for(path))
WRAP(int, lstat64, (const char *path, struct stat64 *to), (path, to), wait_for(path))
WRAP(int, fstatat, (int fd, const char *path, struct stat *to, int how), (fd, path, to, how),
     wait_at(fd, path))
WRAP(int, fstatat64, (int fd, const char *path, struct stat64 *to, int how), (fd, path, to, how),
     wait_at(fd, path))
WRAP(int, statvfs, (const char *path, struct statvfs *to), (path, to), wait_for(path))
WRAP(int, statvfs64, (const char *path, struct statvfs64 *to), (path, to), wait_for(path))
WRAP(int, access, (const char *path, int how), (path, how), wait_for(path))
WRAP(DIR *, opendir, (const char *path), (path), wait_for(path))
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode), wait_for(path))
WRAP(int, rmdir, (const char *path), (path), wait_for(path))
WRAP(int, unlink, (const char *path), (path), wait_for(path))
WRAP(int, unlinkat, (int fd, const char *path, int how), (fd, path, how), wait_at(fd, path))
WRAP(int, rename, (const char *from, const char *to), (from, to), wait_for(from))
WRAP(int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to),
     wait_at(a, from))
WRAP(int, link, (const char *from, const char *to), (from, to), wait_for(from))

static mode_t mode_of(int flags, va_list rest) {
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

#define OPEN(name, params, last, waits, ...) \
    int name params { \
        va_list rest; \
        va_start(rest, last); \
        mode_t mode = mode_of(last, rest); \
        va_end(rest); \
        waits; \
        return NEXT(name)(__VA_ARGS__, mode); \
    }

OPEN(open, (const char *path, int flags, ...), flags, wait_for(path), path, flags)
OPEN(open64, (const char *path, int flags, ...), flags, wait_for(path), path, flags)
OPEN(openat, (int fd, const char *path, int flags, ...), flags, wait_at(fd, path), fd, path, flags)
OPEN(openat64, (int fd, const char *path, int flags, ...), flags, wait_at(fd, path), fd, path, flags)
