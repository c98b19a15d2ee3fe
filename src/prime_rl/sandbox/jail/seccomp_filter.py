"""The system calls that model-written code may use, as a filter program for the kernel."""

import errno
import os
import tempfile

from prime_rl.core.errors import ConfigError

_ALLOWED = """
_llseek accept accept4 access alarm arch_prctl bind brk capget chdir chmod chown clock_getres clock_gettime
clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl
epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve exit exit_group faccessat faccessat2 fadvise64 fallocate
fchdir fchmod fchmodat fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fstat fstatfs fsync ftruncate
futex futex_waitv futimesat get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid geteuid getgid
getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit
getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr inotify_add_watch inotify_init
inotify_init1 inotify_rm_watch kill lchown lgetxattr link linkat listen listxattr llistxattr lseek lstat madvise
membarrier mincore mkdir mkdirat mknod mknodat mlock mmap mprotect mremap msync munlock munmap nanosleep newfstatat
open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 poll ppoll prctl pread64 preadv preadv2 prlimit64
pselect6 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg rename renameat
renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity
sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_yield select sendfile
sendmmsg sendmsg sendto set_robust_list set_thread_area set_tid_address setitimer setpgid setpriority setrlimit setsid
setsockopt shutdown sigaltstack signalfd signalfd4 splice stat statfs statx symlink symlinkat sync_file_range sysinfo
tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime
timerfd_settime times tkill truncate umask uname unlink unlinkat utime utimensat utimes vfork vmsplice wait4 waitid
write writev
"""
_DENIED = """
acct add_key bpf chroot delete_module fanotify_init finit_module fsconfig fsmount fsopen fspick init_module
io_uring_enter io_uring_register io_uring_setup kcmp kexec_load keyctl lookup_dcookie memfd_create memfd_secret mount
mount_setattr move_mount mq_open msgget msgsnd name_to_handle_at open_by_handle_at open_tree perf_event_open
pidfd_getfd pivot_root process_vm_readv process_vm_writev ptrace quotactl reboot request_key semget setdomainname
setgid setgroups sethostname setns setregid setresgid setresuid setreuid setuid shmat shmget swapoff swapon syslog
umount2 unshare userfaultfd
"""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6. Network namespaces do not separate others, such as AF_VSOCK."""
_NAMESPACE_FLAGS = 0x7E020000
_TERMINAL_REQUESTS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. TIOCSTI would type into a terminal."""
_PERSONALITIES = (0, 0xFFFFFFFF)


def build_seccomp_filter() -> bytes:
    """Return the filter as a classic BPF program.

    System calls outside the list fail: with EPERM if they are known and dangerous, else with ENOSYS, as on an older
    kernel. Calls of another architecture end the process.

    Raises:
        ConfigError: the library libseccomp is not installed.
    """
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(f"the sandbox needs libseccomp ({error}); install it: apt-get install libseccomp2") from None

    program = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    denied = seccomp.ERRNO(errno.EPERM)

    program.set_attr(seccomp.Attr.CTL_OPTIMIZE, 2)  # a binary tree instead of a list of 250 comparisons

    def add(action: int, name: str, *arguments: object) -> None:
        if seccomp.resolve_syscall(seccomp.system_arch(), name) >= 0:
            program.add_rule(action, name, *arguments)

    for name in _ALLOWED.split():
        add(seccomp.ALLOW, name)
    for name in _DENIED.split():
        add(denied, name)
    for family in _FAMILIES:
        add(seccomp.ALLOW, "socket", seccomp.Arg(0, seccomp.EQ, family))
    add(seccomp.ALLOW, "socketpair", seccomp.Arg(0, seccomp.EQ, _FAMILIES[0]))
    add(seccomp.ALLOW, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _NAMESPACE_FLAGS, 0))
    for request in _TERMINAL_REQUESTS:
        add(seccomp.ALLOW, "ioctl", seccomp.Arg(1, seccomp.EQ, request))
    for personality in _PERSONALITIES:
        add(seccomp.ALLOW, "personality", seccomp.Arg(0, seccomp.EQ, personality))
    with tempfile.TemporaryFile() as file:
        program.export_bpf(file)
        file.seek(0, os.SEEK_SET)
        return file.read()
