"""One property of many cases as one test: a test for each of hundreds of cases takes pytest longer than the property."""


def each(cases, test):
    """Runs `test(*case)`, or `test(case)` where a case is no tuple, for all cases. All failures are reported, each with its case."""
    failures = []
    for case in cases:
        try:
            test(*case) if isinstance(case, tuple) else test(case)
        except Exception as error:  # noqa: BLE001 - whatever fails is a failure of its case
            error.add_note(f"case: {case!r}")
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(cases)} cases", failures)
