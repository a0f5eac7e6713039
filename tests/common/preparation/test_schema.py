"""Features of records, read by TensorFlow's own parser."""

from common.preparation import schema
from common.tensorflow import tensorflow


def test_an_image_and_lists_of_numbers():
    own = {"i": schema.ints([3, -1]), "f": schema.floats([0.5, 2]), "s": schema.strings([b"a"])}
    features = own | schema.image(b"JPG", (7, 9), "ä.jpg", b"jpeg", "film 1")
    message = tensorflow().train.Example.FromString(schema.serialize(features)).features.feature
    found = {name: [*getattr(x, x.WhichOneof("kind")).value] for name, x in sorted(message.items())}
    image = {name.removeprefix("image/"): x for name, x in found.items() if "image/" in name}
    assert {name: found[name] for name in own} == {"i": [3, -1], "f": [0.5, 2], "s": [b"a"]}
    assert {name: image[name] for name in ("height", "width", "format", "encoded")} == {
        "height": [7],
        "width": [9],
        "format": [b"jpeg"],
        "encoded": [b"JPG"],
    }
    assert image["filename"] == ["ä.jpg".encode()] and len(found) == 9
    assert len(schema.image(b"", (1, 1), "", b"")) == 5  # without a group
