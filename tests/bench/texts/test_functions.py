from __future__ import annotations

from kvboost.bench.texts.functions import files_before, functions, imports, source_of

MEDIAN = next(one for one in functions("statistics") if one.name == "median")


def test_a_function_is_cut_after_its_docstring() -> None:
    assert MEDIAN.head.startswith("def median(data):\n") and MEDIAN.head.endswith('"""\n')
    assert MEDIAN.body.startswith("    data = sorted(data)\n") and MEDIAN.has_doctest
    source = source_of("statistics")
    assert source is not None and source.startswith(MEDIAN.before + MEDIAN.source)
    counted = next(one for one in functions("collections") if one.name == "Counter.most_common")
    assert counted.head.startswith("def most_common(self")  # as if it were in no class


def test_all_functions_do_more_than_their_docstrings_say() -> None:
    every = [one for module in ("statistics", "difflib") for one in functions(module)]
    assert len(every) > 30
    assert all(one.body.strip() and one.head.startswith("def ") for one in every)


def test_what_stands_before_a_function_is_its_file_and_what_that_imports() -> None:
    files = files_before(MEDIAN, 6, 600)
    assert len(files) == 6 and all(len(one) > 60 for one in files)
    paths = [one.partition("\n")[0].removeprefix("# file: ") for one in files]
    assert paths[3:] == ["statistics.py"] * 3
    assert [path.removesuffix(".py") for path in paths[:3]] == list(imports("statistics")[:3])
    assert not any("data = sorted(data)" in one for one in files)
