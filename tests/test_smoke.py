import forgather


def test_the_package_states_its_version():
    assert forgather.__version__.count(".") == 2
