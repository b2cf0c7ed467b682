"""The Numba kernels run as they stand, thread by thread, in Numba's simulator."""

from .subruns import run_tests


def test_numba_kernels_pass_the_same_tests_in_the_simulator():
    """A process of its own, as NUMBA_ENABLE_CUDASIM turns the compiler off; few draws, as it is slow."""
    passed, others = run_tests("simulator", 6, NUMBA_ENABLE_CUDASIM="1")

    assert passed >= 40
    assert others == ""
