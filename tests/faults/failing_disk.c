/* Makes calls on chosen files fail, or never return: a disk that fails, without a disk that does.

   FAILING_DISK is a list of rules "call error part skip", separated by ';': from call number skip on,
   `call` on a file whose path contains `part` fails with that errno, or waits forever if it is -1. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define MOST_RULES 8
static struct { char call[16], part[128]; int error, skip; atomic_int seen; } rules[MOST_RULES];
static int num_rules = -1;

__attribute__((constructor)) static void read_rules(void) {
    const char *text = getenv("FAILING_DISK");
    num_rules = 0;
    while (text && num_rules < MOST_RULES) {
        if (sscanf(text, " %15s %d %127s %d", rules[num_rules].call, &rules[num_rules].error,
                   rules[num_rules].part, &rules[num_rules].skip) == 4)
            num_rules++;
        text = strchr(text, ';');
        if (text) text++;
    }
}

/* The errno with which a call fails now, or 0. */
static int fault(const char *call, const char *path) {
    for (int i = 0; i < num_rules; i++)
        if (!strcmp(call, rules[i].call) && strstr(path, rules[i].part) &&
            atomic_fetch_add(&rules[i].seen, 1) >= rules[i].skip) {
            while (rules[i].error < 0) pause();
            return rules[i].error;
        }
    return 0;
}

static int fault_of(const char *call, int fd) {
    char link[64], path[4096];
    int kept = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = num_rules > 0 ? readlink(link, path, sizeof path - 1) : -1;
    errno = kept;
    if (size < 0) return 0;
    path[size] = 0;
    return fault(call, path);
}

#define REAL(type, name) ((type)dlsym(RTLD_NEXT, name))
#define ON_FILE(result, name, params, args, call)                              \
    result name params {                                                       \
        int error = fault_of(call, fd);                                        \
        if (error) { errno = error; return -1; }                               \
        return REAL(result(*) params, #name) args;                             \
    }

ON_FILE(ssize_t, read, (int fd, void *to, size_t n), (fd, to, n), "read")
ON_FILE(ssize_t, pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at), "read")
ON_FILE(ssize_t, pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at), "read")
ON_FILE(ssize_t, write, (int fd, const void *from, size_t n), (fd, from, n), "write")
ON_FILE(ssize_t, pwrite, (int fd, const void *from, size_t n, off_t at), (fd, from, n, at), "write")
ON_FILE(ssize_t, pwrite64, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at), "write")
ON_FILE(int, fsync, (int fd), (fd), "fsync")
ON_FILE(int, flock, (int fd, int what), (fd, what), "flock")

int link(const char *from, const char *to) {
    int error = fault("link", to);
    if (error) { errno = error; return -1; }
    return REAL(int (*)(const char *, const char *), "link")(from, to);
}

int linkat(int a, const char *from, int b, const char *to, int flags) {
    int error = fault("link", to);
    if (error) { errno = error; return -1; }
    return REAL(int (*)(int, const char *, int, const char *, int), "linkat")(a, from, b, to, flags);
}
