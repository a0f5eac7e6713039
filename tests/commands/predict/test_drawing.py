"""Letters of drawn pictures: no box stands for one."""

import pytest
from matplotlib import font_manager

from commands.predict import drawing


@pytest.fixture(autouse=True)
def forget():
    for function in (drawing._other, drawing._say_once):
        function.cache_clear()
    yield
    drawing._other.cache_clear()


def test_own_font_has_latin_greek_and_cyrillic(capsys):
    text = "Ångström Ωμέγα Щука…"
    assert drawing.drawable(text) == text
    assert drawing.load_font(13, text=text).path == drawing._own(False)
    assert capsys.readouterr().err == ""


def test_letters_of_no_font_are_named_once(monkeypatch, capsys):
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [])
    assert drawing.drawable("cat 猫") == "cat ?" and drawing.drawable("狗") == "?"
    assert capsys.readouterr().err.count("NOTE") == 1


def test_a_font_of_boxes_is_none():
    """One that matplotlib brings says to have all letters, this one of nobody, too."""
    assert drawing.drawable("cat \U00100abc") == "cat ?"
