"""Names of languages: tells which two of several columns, keys or files are a translation.

A tag names a language and perhaps its variant, as "de", "pt-br" of pt_BR, "zh-hant" or "en-latn".
"""

import collections
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LETTER = r"[^\W\d_]"
# In names of files, columns and keys: the languages of public corpora, by ISO 639-1, ISO 639-3, and
# the commoner ones in English. Flags may name others.
_TABLE = """\
source src, target tgt trg, aa aar, ab abk, ae ave, af afr afrikaans, ak aka, am amh amharic, an
arg, ar ara arb arabic, as asm assamese, av ava, ay aym ayr, az aze azj azerbaijani, ba bak, be bel
belarusian, bg bul bulgarian, bi bis, bm bam, bn ben bangla bengali, bo bod tib tibetan, br bre, bs
bos bosnian, ca cat catalan, ce che, ch cha, co cos, cr cre, cs ces cze czech, cv chv, cy cym wel
welsh, da dan danish, de deu ger german, dv div, dz dzo, ee ewe, el ell gre greek, en eng english,
eo epo esperanto, es spa spanish, et ekk est estonian, eu baq eus basque, fa fas per pes persian, ff
ful fuv, fi fin finnish, fj fij, fo fao, fr fra fre french, fy fry, ga gle irish, gd gla, gl glg
galician, gn grn gug guarani, gu guj gujarati, gv glv, ha hau hausa, he heb hebrew, hi hin hindi, ho
hmo, hr hrv croatian, ht hat, hu hun hungarian, hy arm hye armenian, hz her, ia ina, id ind
indonesian, ie ile, ig ibo igbo, ii iii, ik ipk, io ido, is ice isl icelandic, it ita italian, iu
ike iku, ja jpn japanese, jv jav javanese, ka geo kat georgian, kg kng kon, ki kik, kj kua, kk kaz
kazakh, kl kal, km khm khmer, kn kan kannada, ko kor korean, kr kau knc, ks kas, ku kmr kur kurdish,
kv kom kpv, kw cor, ky kir kyrgyz, la lat latin, lb ltz luxembourgish, lg lug luganda, li lim, ln
lin lingala, lo lao, lt lit lithuanian, lu lub, lv lav lvs latvian, mg mlg plt malagasy, mh mah, mi
mao mri maori, mk mac mkd macedonian, ml mal malayalam, mn khk mon mongolian, mr mar marathi, ms may
msa zsm malay, mt mlt maltese, my bur mya burmese, na nau, nb nob, nd nde, ne nep npi nepali, ng
ndo, nl dut nld dutch, nn nno, no nor norwegian, nr nbl, nv nav, ny nya chichewa, oc oci occitan, oj
oji, om gaz orm oromo, or ori ory odia, os oss, pa pan punjabi pnb, pi pli, pl pol polish, ps pbu
pus pashto, pt por portuguese, qu que quz quechua, rm roh, rn run, ro ron rum romanian, ru rus
russian, rw kin kinyarwanda, sa san sanskrit, sc srd, sd snd sindhi, se sme, sg sag, si sin sinhala,
sk slk slo slovak, sl slv slovenian, sm smo, sn sna shona, so som somali, sq alb als sqi albanian,
sr srp serbian, ss ssw, st sot, su sun sundanese, sv swe swedish, sw swa swh swahili, ta tam tamil,
te tel telugu, tg tgk tajik, th tha thai, ti tir tigrinya, tk tuk turkmen, tl tgl fil tagalog, tn
tsn tswana, to ton, tr tur turkish, ts tso, tt tat tatar, tw twi, ty tah, ug uig uyghur, uk ukr
ukrainian, ur urd urdu, uz uzb uzn uzbek, ve ven, vi vie vietnamese, vo vol, wa wln, wo wol wolof,
xh xho xhosa, yi ydd yid yiddish, yo yor yoruba, za zha, zh chi cmn zho chinese, zu zul zulu, bbj,
ceb, ckb, crh, fon, ilo, lua, luo, mos, nso, pcm, yue"""
_CODES = {word: row.split()[0] for row in _TABLE.split(",") for word in row.split()}
# Words, too: alone they say nothing.
_ENGLISH = {"am", "as", "cat", "he", "her", "id", "is", "it", "may", "my", "no", "or", "so", "to"}
_ROLES = {"source", "target"}
_REGION = r"(?:[-_@](?:[A-Z][A-Za-z]{1,3}|[A-Z][a-z]{3}_[A-Z]{2}|[0-9]{3}))?"  # en_US, eng_Latn
_VARIANT = r"([A-Za-z]+)((?:[-_](?:[A-Z][A-Za-z]{1,3}|[a-z]{2}|[0-9]{3})|-[a-z]{4}|[@-]latin)*)"
_TAG = rf"(?:pt-(?:br|pt)|zh-(?:cn|hk|tw))(?![a-z])|[A-Za-z]{{2,}}{_REGION}"  # in a file's name
_PAIR = re.compile(r"(TAG)(?:-|_|2|-to-|_to_)(TAG)".replace("TAG", r"[a-z]{2,3}" + _REGION))

Rows = Sequence[Mapping[Any, str]]  # of a table: cells by the numbers of their columns


def code(word: str) -> str:
    """The tag that a word stands for; "source" and "target" are tags too; or ""."""
    match = re.fullmatch(_VARIANT, word.strip())
    known = _CODES.get(match[1].lower(), "") if match else ""
    return known and known + re.sub("[_@]", "-", match[2].lower()) if match else ""


def named(names: Iterable[str], wanted: tuple[str, str] = ("", "")) -> dict[str, str]:
    """The names of languages, by tag: "de"; else a part, as in "text_de" and "German words".

    Languages that are `wanted` need not be known here, nor the one that stands beside a known one.
    """
    sides: dict[str, str] = {}
    parts: dict[str, str] = {}
    others, words = {*map(str.lower, wanted)} - {""}, {name.strip(): name for name in names}
    known = {code(word) for word in words if word.lower() not in _ENGLISH} - {"", *_ROLES}
    if len(words) == 2 and known:
        others |= {word for word in words if re.fullmatch("[a-z]{3}", word)}
    for word, name in words.items():
        if known := code(word) or (word.lower() if word.lower() in others else ""):
            sides.setdefault(known, name)
        elif len(word) < 40:
            label = re.fullmatch(rf"\w+?[_.-]([A-Za-z]+?{_REGION})", word)
            found = [label[1]] if label else re.findall(r"[A-Za-z]{5,}", word)
            found = [each for each in found if each not in _ENGLISH]
            parts.setdefault(next(filter(None, map(code, found)), ""), name)
    return sides | {each: parts[each] for each in parts if each and each not in sides}


def find(wanted: str, tags: Iterable[str]) -> str:
    """The tag that is wanted, or the only variant of a language that is; or ""."""
    wanted, tags = code(wanted) or wanted.lower(), {*tags}
    variants = [tag for tag in tags if tag.partition("-")[0] == wanted]
    return wanted if wanted in tags else variants[0] if len(variants) == 1 else ""


def choose(names: Iterable[str], wanted: tuple[str, str] = ("", "")) -> tuple[str, ...]:
    """The names of the source and of the target; () if they are not clear.

    The languages in `wanted` come first; each may be "". Then the words source and target count.
    Otherwise English is the source, or the first name where none is English.
    """
    sides = named(names, wanted)
    source, target = (find(each, sides) for each in wanted)
    if [source, target].count("") > wanted.count(""):
        return ()
    if {"source", "target"} <= {*sides} and not (source or target):
        source, target = "source", "target"
    missing = [source, target].count("")
    rest = [each for each in sides if each not in (source, target)]
    if len(rest) > missing:  # columns "id" and "no" hold numbers
        rest = [each for each in rest if each not in {"id", "no", *_ROLES}]
    if not source and target:
        rest = [each for each in rest if each.startswith("en")] or rest
    if missing and len(rest) != missing:
        return ()
    rest.sort(key=lambda each: not each.startswith("en"))
    source = source or rest.pop(0)
    target = target or rest.pop(0)
    return (sides[source], sides[target]) if source != target else ()


def pair_of(path: str) -> tuple[str, ...]:
    """The tags of a pair that a folder or a part of a file's name says, such as en-hau; or ()."""
    *folders, name = path.split("/")
    for part in reversed([*folders, *name.split(".")]):
        if match := _PAIR.fullmatch(part):
            known = {word for word in match.groups() if code(word)}
            is_clear = len(known) == 2 or part in folders  # of en-abc only a folder
            if is_clear and known - _ENGLISH:
                return tuple(code(word) or word for word in match.groups())
    return ()


def of_path(path: str) -> str:
    """The tag that a folder or a part of a file's name is, as of x.fr.po, or ends with; or ""."""
    parts = re.split(r"[/.]|[-_](?=[a-z]{2,3}(?:[-_][A-Z]{2})?\.)", path)
    return next((tag for tag in map(code, reversed(parts)) if tag not in {*_ROLES, ""}), "")


def groups(names: Iterable[str]) -> list[dict[str, str]]:
    """The names that differ in the language only, by tag, such as x.de-en.en and x.de-en.de.

    The last word of a name that is a language counts, or one before it where it has no partner.
    """
    left, found = [*names], []
    for depth in (1, 2, 3):
        stems: dict[str, dict[str, str]] = collections.defaultdict(dict)
        for name in left:
            words = [word for word in re.finditer(_TAG, name) if code(word[0])]
            if len(words) >= depth:
                word = words[-depth]
                stem = f"{name[: word.start()]}*{name[word.end() :]}".removesuffix(".gz")
                stems[stem][code(word[0])] = name
        complete = [sides for sides in stems.values() if len(sides) > 1]
        taken = {*itertools.chain.from_iterable(sides.values() for sides in complete)}
        left, found = [name for name in left if name not in taken], [*found, *complete]
    return found


def have_header(rows: Rows, columns: Sequence[str], wanted: tuple[str, str]) -> bool:
    """Whether the first row has the `columns`, or alone names two languages."""
    if columns and {*columns} <= {cell.strip() for cell in rows[0].values()}:
        return True
    if _ROLES.issubset(map(code, rows[0].values())):
        return True  # beside columns of languages, in which rows name some, too
    first, *later = (len(named(row.values(), wanted)) > 1 for row in rows[:2])
    return first and not any(later)


def text_columns(rows: Rows) -> list[Any]:
    """The first two columns that hold text: no numbers, no codes of languages."""
    texts = []
    for key in dict.fromkeys(itertools.chain(*rows)):
        cells = [cell for row in rows if (cell := row.get(key, "").strip())]
        if are_mostly(cells, LETTER) and not all(map(code, cells)):
            texts.append(key)
    return texts[:2]


def are_mostly(texts: Sequence[str], pattern: str) -> bool:
    """Whether a half or more of some texts have a regular expression in them."""
    return 2 * sum(bool(re.search(pattern, text)) for text in texts) >= len(texts) > 0
