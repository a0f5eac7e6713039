"""Letters of pictures: no box stands for one."""

import pytest
from matplotlib import font_manager

from commands.predict import fonts


@pytest.fixture(autouse=True)
def forget():
    for function in (fonts._other, fonts._note):
        function.cache_clear()
    yield
    fonts._other.cache_clear()


def test_own_font_has_latin_greek_and_cyrillic(capsys):
    text = "Ångström Ωμέγα Щука…"
    assert fonts.drawable(text) == text and fonts.load(13, text=text).path == fonts._own(False)
    assert capsys.readouterr().err == ""


def test_letters_of_no_font_are_named_once(monkeypatch, capsys):
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [])
    assert fonts.drawable("cat 猫") == "cat ?" and fonts.drawable("狗") == "?"
    assert capsys.readouterr().err.count("NOTE") == 1


def test_a_font_of_boxes_is_none():
    """One that matplotlib brings says to have all letters, this one of nobody, too."""
    assert fonts.drawable("cat \U00100abc") == "cat ?"


def test_a_font_of_the_machine_is_taken(monkeypatch, capsys):
    other = type("Font", (), {"fname": fonts._own(True), "name": "Any"})
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [other])
    letters = {
        fonts._own(False): frozenset("cat "),
        fonts._own(True): frozenset("猫") | fonts._ALWAYS,
    }
    monkeypatch.setattr(fonts, "_letters", letters.get)
    assert fonts.drawable("cat 猫") == "cat 猫"
    assert fonts.load(13, text="cat 猫").path == fonts._own(True)
    assert capsys.readouterr().err == ""
