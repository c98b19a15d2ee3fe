"""Tests of the limit of open files."""

import resource

from prime_rl.core.os_errors import allow_open_files


def test_allow_open_files_raises_the_limit_up_to_the_hard_limit() -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        allow_open_files()
        soft, same = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert same == hard
        assert soft == (65536 if hard == resource.RLIM_INFINITY else min(hard, 65536))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
