"""What a trained model can be used for, besides being scored.

`Benchmark.uses` gives the `Uses` of a benchmark. The commands ask for it; a training run does for
`config.init_from` only, to read another library's weights. If predict.py and scripts/demo.py are to
answer with the models, it is one of four kinds: `Classes`, `Boxes`, `Sentences` or `Items`. Their
abstract methods are what such a benchmark owes; a `Uses` without one of them cannot be made.

Letters in shapes: b is a batch, n any number.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import jax
import numpy as np

if TYPE_CHECKING:
    from common.exportable import ExportableClassifier, ExportableProgram, Translated
    from common.images.input_spec import InputSpec


class Matrix(NamedTuple):
    """How often examples of a true class (row) were taken for a class (column); int[K, K]."""

    names: Sequence[str]
    counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar of a chart; `value` and `ideal`, where a mark is drawn, are from 0 to 1."""

    label: str
    value: float
    ideal: float
    count: int  # the number of examples behind it


class Picture(NamedTuple):
    """A JPEG or PNG with a few lines below it; a `flag` is shown as a warning.

    A `wide` picture has two images beside each other, or needs as much space.
    """

    data: bytes
    caption: Sequence[str]
    flag: str = ""
    wide: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One thing to show about the predictions; the parts that are empty are not shown.

    Texts may come from the data: whoever shows them escapes them.
    """

    title: str
    text: str = ""
    columns: Sequence[str] = ()  # the head of the table
    rows: Sequence[Sequence[str]] = ()
    has_mean: bool = False  # whether the last row is the mean of the others
    matrix: Matrix | None = None
    bars: Sequence[Bar] = ()
    pictures: Sequence[Picture] = ()
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # by name


class Imported(NamedTuple):
    """Weights of another library under the names of a benchmark's model, as NumPy arrays."""

    source: str  # the file
    params: Any
    model_state: Any
    metadata: dict[str, Any]  # replaces `Benchmark.metadata` in a checkpoint's manifest
    summary: str  # the content of the file, in one line
    files: Mapping[str, bytes] = {}  # by name, what the model needs in its data_dir


class Uses:
    """The uses of one benchmark's models; every default says that there is no such use."""

    at_once = 8  # examples that a device computes at once to answer, in batches of any size
    # How a trained model is used if predict.py cannot use it, as a sentence.
    hint = "python main.py --mode=eval evaluates it"
    # Commands that use a trained model, by purpose, for the report; "{workdir}" stands for its run.
    commands: Mapping[str, str] = {}

    def data_meaning(self) -> Mapping[str, Any]:
        """`Identity.meaning` as a small file in the data's folder has it now; {} without the file.

        Modes that do not read the data call it.

        Raises:
          DataError: the file is damaged.
        """
        return {}

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        """Shows the predictions: mistakes, examples, and files for other programs.

        --mode=report shows them on its page; --mode=eval and the report write their files. Only
        process 0 calls it, with the rows that `score` gets.
        """
        return []

    def with_weights(self, params: Any, model_state: Any) -> Uses:
        """These uses with a model's weights, NumPy arrays, for `exhibits` that show more by them.

        --mode=report asks for it.
        """
        return self

    def portable(self, params: Any, model_state: Any) -> ExportableClassifier | None:
        """The model in the forms that other programs read; None where there are none.

        The arrays are NumPy's.
        """
        return None

    def check_files(self, manifest: Mapping[str, Any], source: str) -> None:
        """Checks the files in the data folder that the use of the model needs.

        Args:
          manifest: of the checkpoint.
          source: the checkpoint, for messages.

        Raises:
          UserError: a file is missing, or it does not belong to the model.
        """

    def programs(self, params: Any, model_state: Any) -> Mapping[str, ExportableProgram]:
        """The model as functions for other programs, if it is not `portable`.

        Most models have one program, named ""; other names become part of the file's name. The
        arrays are NumPy's.
        """
        return {}

    @property
    def formats(self) -> Sequence[str]:
        """The formats of --mode=export beside those of `portable` or `programs`."""
        return ()

    def write_ctranslate2(self, params: Any, folder: str) -> Sequence[Translated]:
        """Writes a translator into a local folder, for commands/export/translate.py.

        Returns sentences that predict.py has translated. ConfigError if there is no such form.
        """
        raise NotImplementedError

    def foreign_folder(self, params: Any) -> tuple[Mapping[str, np.ndarray], Mapping[str, bytes]]:
        """A translator as `read_foreign` reads it: arrays by name, and the files beside them."""
        raise NotImplementedError

    def read_foreign(self, file: str) -> Imported | None:
        """Reads another library's weights; None if the benchmark takes none.

        `common.foreign.find` returned `file`, local or gs://. The benchmark is made with what
        `benchmarks.base.Model.foreign_settings` returns for it.

        Raises:
          DataError: the file cannot be used.
        """
        return None


# What predict.py and scripts/demo.py answer with; `params` and `model_state` as in `predict`.


class Classes(Uses, abc.ABC):
    """The K classes of pictures; `Benchmark.metadata["class_names"]` names them in a checkpoint."""

    @property
    @abc.abstractmethod
    def num_classes(self) -> int:
        """K."""

    @property
    def several(self) -> bool:
        """Whether a picture has any of the classes, so that each logit is an answer of its own."""
        return False

    @property
    @abc.abstractmethod
    def input_spec(self) -> InputSpec:
        """How a photo becomes the pixels that `classify` takes."""

    @abc.abstractmethod
    def classify(self, params: Any, model_state: Any, images: jax.Array) -> dict[str, jax.Array]:
        """{"logits": f32[b, K], "features": f32[b, n]} of RGB images uint8[b, size, size, 3].

        `common.images.input_spec.prepare_image` makes the images; `size` is the spec's.
        """

    def heat_maps(
        self, params: Any, model_state: Any, images: jax.Array, classes: jax.Array
    ) -> jax.Array | None:
        """Which pixels speak for a class, f32[b, size, size] from 0 to 1; None: there are no maps.

        `images` are as in `classify`; `classes` int[b] is the class of each, from 0.
        """
        return None


LEAST_TILE = 32  # pixels of a tile's side


class Detection(NamedTuple):
    """An object that a detector has found on a photo."""

    number: int  # of its class, from 1
    score: float  # above 0
    box: tuple[float, ...]  # (y0, x0, y1, x1) in pixels of the photo
    outline: Mapping[str, Any] | None = None  # run lengths, as pycocotools writes them
    inside: Callable[[], np.ndarray] | None = None  # makes bool[height, width] of the outline


class Boxes(Uses, abc.ABC):
    """The objects on photos, in boxes; `Benchmark.predict` finds them.

    A checkpoint keeps `Benchmark.metadata["categories"]`, (id, name) of each class in order, "" for
    one that the data did not have.
    """

    @abc.abstractmethod
    def inputs(self, encoded: bytes, height: int, width: int) -> dict[str, np.ndarray]:
        """The leaves of `Benchmark.predict` for one photo, as evaluation makes them of a record.

        `encoded` is an upright JPEG of `height` x `width` pixels; DataError says that it cannot be
        decoded.
        """

    @property
    @abc.abstractmethod
    def tile_side(self) -> int:
        """The side in pixels of the tiles that the model sees in their own size."""

    @abc.abstractmethod
    def parts(
        self, encoded: bytes, height: int, width: int, tile: int
    ) -> Sequence[Callable[[], dict[str, np.ndarray]]]:
        """Functions that make the `inputs` of a photo, and of its tiles with `tile` pixels a side.

        The photo is decoded already, or DataError says that it cannot be. A `tile` of 0 cuts none.
        """

    @abc.abstractmethod
    def join(
        self, rows: Sequence[Mapping[str, np.ndarray]], height: int, width: int, tile: int
    ) -> Mapping[str, np.ndarray]:
        """The row of a photo, from the rows of its `parts`."""

    @abc.abstractmethod
    def detections(self, row: Mapping[str, np.ndarray], height: int, width: int) -> list[Detection]:
        """The objects of a photo, the best first, from its row of `Benchmark.predict`."""

    def listed(self, paths: Sequence[str]) -> tuple[str, dict[int, tuple[int, int, int]]]:
        """The file of annotations in the folder of the run's data, and the pictures that it lists.

        The second value has the id, height and width of each listed picture, by its index in
        `paths`. ("", {}) where there is no such file.
        """
        return "", {}


class Sentences(Uses, abc.ABC):
    """Translations of sentences: the model takes and gives ids of words, which 0 pads."""

    # What sentences are padded to, rising; longer ones double the last. Each is compiled once.
    lengths: Sequence[int] = (16, 64, 256, 1024)
    beams = 1  # translations that the search keeps; --beams sets config.beam_size, if it exists

    @property
    def languages(self) -> tuple[str, str]:
        """Tags such as "de" and "pt-br", of sentences and of translations; "" where unknown."""
        return "", ""

    @property
    def codes(self) -> Sequence[str]:
        """Codes of target languages, with one of which each sentence must begin; () for none."""
        return ()

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a sentence, above 0; no ids for an empty sentence."""

    @abc.abstractmethod
    def n_best(self, params: Any, inputs: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
        """The `top` best translations of sentences int32[b, size], at most `beams`.

        Returns:
          Ids int32[b, top, n] and scores f32[b, top], the best first; -inf for a translation that
          does not exist.
        """

    @abc.abstractmethod
    def text(self, tokens: np.ndarray) -> str:
        """The text of a translation int32[n], in one line."""

    def plain(self, text: str) -> str:
        """A sentence as people write it, if `encode` takes tokenized ones."""
        return text

    def is_cut(self, tokens: np.ndarray) -> bool:
        """Whether a translation int32[n] reached the greatest length before its end."""
        return False

    def unknown_words(self, sentences: Iterable[Sequence[int]]) -> int:
        """How many ids stand for words that the vocabulary does not have."""
        return 0


class Finder(Protocol):
    """Finds rows of the model's table of users or items."""

    noun: str  # "user" or "item"
    ids: np.ndarray  # uint32[n], the id of each row

    def find(self, text: str) -> Iterator[tuple[str, int | str]]:
        """(each id or name in a text, its row or the reason why it has none)."""
        ...

    def name(self, row: int) -> str:
        """The name of a user or the title of an item; "" if it has none."""
        ...


class Items(Uses, abc.ABC):
    """The items that users rate most probably. A user is a vector f32[w]; `params` are NumPy's."""

    @abc.abstractmethod
    def finder(self, kind: Literal["user", "item"]) -> Finder:
        """Finds users or items; it knows the ids alone, and logs it, if names cannot be read."""

    @abc.abstractmethod
    def vector(self, params: Any, user: int) -> np.ndarray | None:
        """The vector of the user in a row of the table; None if nothing of the user was trained."""

    @abc.abstractmethod
    def newcomer(self, params: Any, history: Sequence[int]) -> np.ndarray | None:
        """The vector of a user who is not in the model but has the items in the rows `history`.

        None if no user of the training data has one of these items.
        """

    @abc.abstractmethod
    def search_vectors(self, params: Any) -> tuple[np.ndarray, np.ndarray]:
        """(f32[items, n], f32[w + 1, n]): the items' vectors, and what makes those of users.

        A user's is [vector, 1] @ the matrix. The inner product with an item's is nearly a number
        that rises with the item's score. The last number of all users' is 1. The cosine of the
        others says how similar two items are. CheckpointError if the weights are not finite.
        """

    @abc.abstractmethod
    def is_trained(self) -> np.ndarray:
        """bool[items]: whether a user of the training data has the item."""

    @abc.abstractmethod
    def rated(self, user: int) -> np.ndarray:
        """int[n], the rows of the items that a user has rated, which are not recommended."""

    @abc.abstractmethod
    def scores(self, params: Any, vectors: jax.Array) -> jax.Array:
        """The probabilities f32[b, items] that users with vectors f32[b, w] rate each item."""
