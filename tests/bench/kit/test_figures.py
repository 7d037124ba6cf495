from __future__ import annotations

import subprocess
import sys

import pytest

from kvboost.bench.kit.figures import (
    check_plot,
    draw_lines,
    save,
)
from kvboost.errors import ConfigError

PANELS = {
    "same text": {"none": [(0, 0.4)], "late": [(30, 0.01), (10, 0.1), (20, 0.03)]},
    "other text": {"late": [(10, 0.3), (20, 0.2)]},
}


def quality_figure(panels, *, title: str):
    return draw_lines(panels, title=title, x="share", y="KL")


def curve(axes, name):
    (line,) = [line for line in axes.lines if line.get_label() == name]
    return line


@pytest.mark.parametrize(("suffix", "beginning"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_the_suffix_says_what_is_saved(tmp_path, suffix, beginning) -> None:
    path = tmp_path / f"quality{suffix}"
    save(quality_figure(PANELS, title="Quality"), path)
    assert path.read_bytes().startswith(beginning)


def test_zero_has_a_place_below_all_others() -> None:
    (axes,) = quality_figure({"": {"late": [(10, 0.02), (100, 0.0)]}}, title="Quality").axes
    assert list(curve(axes, "late").get_ydata()) == [0.02, 0.0]
    assert axes.get_yscale() == "symlog" and axes.get_ylim()[0] < 0


@pytest.mark.parametrize(
    ("panels", "said"),
    [
        *((panels, "nothing to plot") for panels in ({}, {"a": {}}, {"a": {"late": []}})),
        ({"": {"late": [(0, 0.1), (10, float("nan"))]}}, "finite"),
        ({"": {"late": [(0, 0.1), (float("inf"), 0.1)]}}, "finite"),
    ],
)
def test_what_cannot_be_plotted_is_refused(panels, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        quality_figure(panels, title="Quality")


def test_missing_matplotlib_says_how_to_install_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvboost\[plot\]'"):
        check_plot(tmp_path / "quality.png")


def test_a_plot_leaves_the_backend_alone(tmp_path) -> None:
    """A user's own pyplot must not change, so ours never imports it."""
    code = (
        "import sys; from kvboost.bench.kit.figures import draw_lines, save\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"figure = draw_lines({PANELS!r}, title='Quality', x='x', y='y')\n"
        f"save(figure, {str(tmp_path / 'quality.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
