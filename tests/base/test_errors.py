import hocket.base.errors as errors
from hocket.base.errors import HocketError


def _all_errors():
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    return [kind for kind in kinds if issubclass(kind, HocketError)]


def test_exit_codes_are_the_documented_ones():
    codes = {kind.__name__: kind.exit_code for kind in _all_errors()}
    assert codes == {
        "HocketError": 1,
        "UsageError": 2,
        "MissingExtraError": 2,
        "InputFileError": 3,
        "NoFeasiblePlanError": 4,
        "RunError": 5,
        "CheckError": 6,
        "InterruptedByUserError": 130,
    }


def test_each_error_has_its_own_machine_readable_code():
    codes = [kind.code for kind in _all_errors()]
    assert len(set(codes)) == len(codes)


def test_error_text_says_where_what_and_what_to_do():
    error = errors.InputFileError("flops is -1", where="g.json", hint="use 0 or more")
    assert str(error) == "g.json: flops is -1\nhint: use 0 or more"
    assert error.as_dict() == {
        "code": "bad-input",
        "message": "flops is -1",
        "hint": "use 0 or more",
        "where": "g.json",
    }


def test_unknown_names_get_the_closest_or_the_list():
    assert "did you mean 'm-topo'?" in str(errors.unknown_name("planner", "mtopo", ["m-topo", "x"]))
    assert "known: a, b" in str(errors.unknown_name("planner", "zzz", ["b", "a"]))
