/* Counts every call that changes the disk below one directory, and lets one of them fail.
 *
 * Loaded with LD_PRELOAD, so that SQLite's own calls count like Python's. Nothing happens before fail_points_arm().
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { COUNT, KILL_BEFORE, KILL_WITHIN, KILL_AFTER, EIO_ONCE, FULL, SHORT };
enum { KILLED = 137, LOG_SIZE = 1 << 20 };

static int is_armed, mode, is_full;
static long target, count;
static char under[PATH_MAX];
static char names[LOG_SIZE];
static size_t names_used;

void fail_points_arm(const char *directory, long at, int how)
{
    snprintf(under, sizeof under, "%s", directory);
    target = at, mode = how, count = 0, is_full = 0, names_used = 0, names[0] = 0, is_armed = 1;
}

void fail_points_disarm(void) { is_armed = 0; }
long fail_points_count(void) { return count; }
const char *fail_points_names(void) { return names; }

static int is_below(const char *path)
{
    size_t size = strlen(under);
    return strncmp(path, under, size) == 0 && (path[size] == '/' || path[size] == 0);
}

static int names_fd(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return is_below(path);
}

static int names_at(int directory, const char *name, char *path)
{
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return is_below(path);
    }
    if (directory == AT_FDCWD) {
        if (!getcwd(path, PATH_MAX))
            return 0;
    } else if (!names_fd(directory, path))
        return 0;
    size_t used = strlen(path);
    snprintf(path + used, PATH_MAX - used, "/%s", name);
    return is_below(path);
}

/* Returns what becomes of this call: 0 to carry it out, a mode, or KILL_AFTER to die once it is done. */
static int reach(const char *call, const char *path, int takes_space)
{
    const char *end = strrchr(path, '/');
    int used = snprintf(names + names_used, LOG_SIZE - names_used, "%s %s\n", call, end ? end + 1 : path);
    if (used > 0 && names_used + used < LOG_SIZE)
        names_used += used;
    long here = count++;
    if (here == target && mode == FULL)
        is_full = 1;
    if (is_full)
        return takes_space ? FULL : 0;
    if (here != target)
        return 0;
    if (mode == KILL_BEFORE)
        _exit(KILLED);
    return mode;
}

static int refuse(int what)
{
    errno = what == FULL ? ENOSPC : EIO;
    return -1;
}

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name); real; })

#define WRITE(name, declaration, arguments, half)                                                                      \
    ssize_t name declaration                                                                                           \
    {                                                                                                                  \
        char path[PATH_MAX];                                                                                           \
        int what = 0;                                                                                                  \
        if (is_armed && names_fd(fd, path))                                                                            \
            what = reach("write", path, 1);                                                                            \
        if (what == EIO_ONCE || what == FULL)                                                                          \
            return refuse(what);                                                                                       \
        if (what == SHORT || what == KILL_WITHIN) {                                                                    \
            ssize_t done = REAL(name) half;                                                                            \
            if (what == KILL_WITHIN)                                                                                   \
                _exit(KILLED);                                                                                         \
            return done;                                                                                               \
        }                                                                                                              \
        ssize_t done = REAL(name) arguments;                                                                           \
        if (what == KILL_AFTER)                                                                                        \
            _exit(KILLED);                                                                                             \
        return done;                                                                                                   \
    }

WRITE(write, (int fd, const void *data, size_t size), (fd, data, size), (fd, data, size / 2 ? size / 2 : size))
WRITE(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at),
      (fd, data, size / 2 ? size / 2 : size, at))
WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at),
      (fd, data, size / 2 ? size / 2 : size, at))

WRITE(sendfile, (int fd, int from, off_t *at, size_t size), (fd, from, at, size),
      (fd, from, at, size / 2 ? size / 2 : size))
WRITE(sendfile64, (int fd, int from, off64_t *at, size_t size), (fd, from, at, size),
      (fd, from, at, size / 2 ? size / 2 : size))

#define FINISH(what, name, arguments)                                                                                  \
    if (what == EIO_ONCE || what == FULL)                                                                              \
        return refuse(what);                                                                                           \
    int result = REAL(name) arguments;                                                                                 \
    if (what == KILL_AFTER || what == KILL_WITHIN)                                                                     \
        _exit(KILLED);                                                                                                 \
    return result;

static int grows(int fd, off64_t size)
{
    struct stat64 found;
    return fstat64(fd, &found) == 0 && size > found.st_size;
}

#define ON_FD(name, declaration, arguments, takes_space)                                                               \
    int name declaration                                                                                               \
    {                                                                                                                  \
        char path[PATH_MAX];                                                                                           \
        int what = is_armed && names_fd(fd, path) ? reach(#name, path, takes_space) : 0;                               \
        FINISH(what, name, arguments)                                                                                  \
    }

ON_FD(fsync, (int fd), (fd), 0)
ON_FD(fdatasync, (int fd), (fd), 0)
ON_FD(ftruncate, (int fd, off_t size), (fd, size), grows(fd, size))
ON_FD(ftruncate64, (int fd, off64_t size), (fd, size), grows(fd, size))

#define ON_PATH(name, declaration, directory, path_argument, arguments, takes_space)                                   \
    int name declaration                                                                                               \
    {                                                                                                                  \
        char path[PATH_MAX];                                                                                           \
        int what = is_armed && names_at(directory, path_argument, path) ? reach(#name, path, takes_space) : 0;         \
        FINISH(what, name, arguments)                                                                                  \
    }

ON_PATH(rename, (const char *from, const char *to), AT_FDCWD, to, (from, to), 0)
ON_PATH(renameat, (int from_at, const char *from, int to_at, const char *to), to_at, to, (from_at, from, to_at, to), 0)
ON_PATH(unlink, (const char *name), AT_FDCWD, name, (name), 0)
ON_PATH(unlinkat, (int at, const char *name, int flags), at, name, (at, name, flags), 0)
ON_PATH(rmdir, (const char *name), AT_FDCWD, name, (name), 0)
ON_PATH(mkdir, (const char *name, mode_t rights), AT_FDCWD, name, (name, rights), 1)
ON_PATH(symlink, (const char *to, const char *name), AT_FDCWD, name, (to, name), 1)
ON_PATH(link, (const char *from, const char *name), AT_FDCWD, name, (from, name), 1)

/* Opening counts where it makes a file, or empties one. */
#define OPEN(name, declaration, directory, before)                                                                     \
    int name declaration                                                                                               \
    {                                                                                                                  \
        char path[PATH_MAX];                                                                                           \
        mode_t rights = 0;                                                                                             \
        if (flags & (O_CREAT | __O_TMPFILE)) {                                                                         \
            va_list more;                                                                                              \
            va_start(more, flags);                                                                                     \
            rights = va_arg(more, mode_t);                                                                             \
            va_end(more);                                                                                              \
        }                                                                                                              \
        int what = 0;                                                                                                  \
        if (is_armed && (flags & (O_CREAT | O_TRUNC)) && names_at(directory, file, path) &&                            \
            ((flags & O_TRUNC) || access(path, F_OK) != 0))                                                            \
            what = reach("create", path, 1);                                                                           \
        FINISH(what, name, before)                                                                                     \
    }

OPEN(open, (const char *file, int flags, ...), AT_FDCWD, (file, flags, rights))
OPEN(open64, (const char *file, int flags, ...), AT_FDCWD, (file, flags, rights))
OPEN(openat, (int at, const char *file, int flags, ...), at, (at, file, flags, rights))
OPEN(openat64, (int at, const char *file, int flags, ...), at, (at, file, flags, rights))
