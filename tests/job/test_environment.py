"""Unknown environment variables with our prefix are reported with the nearest known name."""

from __future__ import annotations

from hybridcomp.job import environment


def test_an_unknown_variable_is_reported_with_the_nearest_name_or_all() -> None:
    said = list(environment.unknown({"HYBRIDCOMP_CONFG": "x", "HYBRIDCOMP_RECORD": "y", "A": "z"}))
    assert said == [
        "HYBRIDCOMP_CONFG is not known and has no effect; did you mean HYBRIDCOMP_CONFIG?"
    ]
    (said_of_q,) = environment.unknown({"HYBRIDCOMP_Q": "1"})
    assert said_of_q.endswith(f"there are {', '.join(environment.VARIABLES)}")


def test_what_tests_and_scripts_read_is_known() -> None:
    names = environment.VARIABLES + environment.CHECKOUT
    assert not list(environment.unknown(dict.fromkeys(names, "1")))
