"""Names that look the same."""

import unicodedata

from common.similar_names import alike, normal_name


def test_names_that_look_the_same_have_one_form():
    name = "Jos\u00e9 Ramos"
    assert normal_name(unicodedata.normalize("NFD", f" {name}")) == name
    assert normal_name("\ufeffJos\u00e9\u00a0 Ramos\t") == name
    assert normal_name("Jo\u200bse\u2060\u0301 Ra\u00admos\u200e") == name
    assert normal_name("\u06cc\u200c\u0631") == "\u06cc\u200c\u0631"  # it parts letters of Persian
    assert normal_name("Cat") != normal_name("cat")
    assert alike(["Cat", "dog", "cat ", "Cat", "\uff23at"]) == [["Cat", "cat ", "\uff23at"]]
