/* Storage of which one read fails: the call number $JAXRES_TEST_FAIL_NUMBER among those that match
   $JAXRES_TEST_FAIL_CALL (fnmatch on "FUNCTION PATH") below one of $JAXRES_TEST_FAIL_UNDER (with
   colons between) fails with EIO, in whichever process it is. Every such call, failed ones with "!",
   is a line of $JAXRES_TEST_FAIL_CALLS, whose counter is the first 8 bytes of
   $JAXRES_TEST_FAIL_COUNT. To be preloaded. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_below(const char *path) {
    const char *folder = getenv("JAXRES_TEST_FAIL_UNDER");
    while (folder && *folder) {
        size_t length = strcspn(folder, ":");
        if (strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0))
            return 1;
        folder += length + (folder[length] == ':');
    }
    return 0;
}

static uint64_t counted(void) {
    int fd = syscall(SYS_openat, AT_FDCWD, getenv("JAXRES_TEST_FAIL_COUNT"), O_RDWR | O_CLOEXEC);
    if (fd < 0) return 0;
    uint64_t *count = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (count == MAP_FAILED) return 0;
    uint64_t number = __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
    munmap(count, 8);
    return number;
}

static void write_line(const char *call, int failed) {
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s%s\n", failed ? "!" : "", call);
    int flags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC;
    int fd = syscall(SYS_openat, AT_FDCWD, getenv("JAXRES_TEST_FAIL_CALLS"), flags, 0666);
    if (fd < 0) return;
    syscall(SYS_write, fd, line, length);
    syscall(SYS_close, fd);
}

/* Returns whether this call fails. */
static int fails(const char *function, const char *path) {
    const char *wanted = getenv("JAXRES_TEST_FAIL_CALL"), *number;
    if (!wanted || !path || path[0] != '/' || !is_below(path)) return 0;
    char call[PATH_MAX + 32];
    int before = errno, failed = 0;
    snprintf(call, sizeof call, "%s %s", function, path);
    if (fnmatch(wanted, call, 0) == 0 && (number = getenv("JAXRES_TEST_FAIL_NUMBER"))) {
        failed = counted() == strtoull(number, NULL, 10);
        write_line(call, failed);
    }
    errno = failed ? EIO : before;
    return failed;
}

static int fails_fd(const char *function, int fd) {
    if (!getenv("JAXRES_TEST_FAIL_CALL")) return 0;
    char name[64], path[PATH_MAX];
    int before = errno;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, name, path, sizeof path - 1);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return fails(function, path);
}

static int fails_at(const char *function, int fd, const char *path) {
    if (path && path[0] == '/') return fails(function, path);
    return fd != AT_FDCWD && fails_fd(function, fd);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRAP(kind, name, params, args, fails, error) \
    kind name params { return fails ? error : NEXT(name) args; }

WRAP(ssize_t, read, (int fd, void *to, size_t n), (fd, to, n), fails_fd("read", fd), -1)
WRAP(ssize_t, readv, (int fd, const struct iovec *to, int n), (fd, to, n), fails_fd("read", fd), -1)
WRAP(ssize_t, pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at),
     fails_fd("read", fd), -1)
WRAP(ssize_t, pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at),
     fails_fd("read", fd), -1)
WRAP(ssize_t, preadv, (int fd, const struct iovec *to, int n, off_t at), (fd, to, n, at),
     fails_fd("read", fd), -1)
WRAP(ssize_t, preadv64, (int fd, const struct iovec *to, int n, off64_t at), (fd, to, n, at),
     fails_fd("read", fd), -1)
WRAP(int, fstat, (int fd, struct stat *to), (fd, to), fails_fd("stat", fd), -1)
WRAP(int, fstat64, (int fd, struct stat64 *to), (fd, to), fails_fd("stat", fd), -1)
WRAP(int, stat, (const char *path, struct stat *to), (path, to), fails("stat", path), -1)
WRAP(int, stat64, (const char *path, struct stat64 *to), (path, to), fails("stat", path), -1)
WRAP(int, lstat, (const char *path, struct stat *to), (path, to), fails("stat", path), -1)
WRAP(int, lstat64, (const char *path, struct stat64 *to), (path, to), fails("stat", path), -1)
WRAP(int, fstatat, (int fd, const char *path, struct stat *to, int how), (fd, path, to, how),
     fails_at("stat", fd, path), -1)
WRAP(int, fstatat64, (int fd, const char *path, struct stat64 *to, int how), (fd, path, to, how),
     fails_at("stat", fd, path), -1)
WRAP(int, statx, (int fd, const char *path, int how, unsigned mask, struct statx *to),
     (fd, path, how, mask, to), fails_at("stat", fd, path), -1)
WRAP(int, access, (const char *path, int how), (path, how), fails("access", path), -1)
WRAP(DIR *, opendir, (const char *path), (path), fails("list", path), NULL)
WRAP(struct dirent *, readdir, (DIR *folder), (folder), fails_fd("list", dirfd(folder)), NULL)
WRAP(struct dirent64 *, readdir64, (DIR *folder), (folder), fails_fd("list", dirfd(folder)), NULL)

static mode_t mode_of(int flags, va_list rest) {
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

/* Only what is opened for reading. */
#define OPEN(name, params, fails, ...) \
    int name params { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        if (!(flags & (O_WRONLY | O_RDWR | O_CREAT)) && fails) return -1; \
        return NEXT(name)(__VA_ARGS__, mode); \
    }

OPEN(open, (const char *path, int flags, ...), fails("open", path), path, flags)
OPEN(open64, (const char *path, int flags, ...), fails("open", path), path, flags)
OPEN(openat, (int fd, const char *path, int flags, ...), fails_at("open", fd, path), fd, path, flags)
OPEN(openat64, (int fd, const char *path, int flags, ...), fails_at("open", fd, path),
     fd, path, flags)
