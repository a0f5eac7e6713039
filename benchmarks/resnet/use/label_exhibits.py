"""Shows what a classifier with several labels per picture gets wrong, as `exhibits` does for one.

In shapes n is the number of pictures and K that of labels.
"""

import numpy as np

from benchmarks.exhibits import CLASSES, csv_file, percent, sigmoid
from benchmarks.resnet import scores
from benchmarks.resnet.use.exhibits import Photos
from benchmarks.uses import Exhibit

_SHOWN = 12  # pictures of each kind


def make(
    ids: np.ndarray, logits: np.ndarray, labels: np.ndarray, precisions: np.ndarray, photos: Photos
) -> list[Exhibit]:
    """The table of labels, then labels too many, labels missed and right ones, the surest first.

    Args:
      ids: int[n], the number of each picture in the data.
      logits: float[n, K]; a label is predicted where it is above 0, which is a probability of 0.5.
      labels: bool[n, K], which labels each picture has.
      precisions: float[K], the average precision of each label, nan where no picture has it.
      photos: the pictures.
    """
    names = np.array(photos.names)
    shares, found = sigmoid(logits), logits > 0
    head = ["file", "record", "labels", "exact", *(f"probability of {name}" for name in names)]
    table = []
    for i in np.argsort(ids, kind="stable").tolist():
        path, record = photos.source.shards.place(int(ids[i]))
        row = [path.rpartition("/")[2], record, "|".join(names[labels[i]])]
        row.append(int((found[i] == labels[i]).all()))
        table.append([*row, *(f"{share:.6f}" for share in shares[i])])
    kinds = (  # and how sure the model is of them
        ("Labels too many", "worst", "labels that are not the picture's", found & ~labels, shares),
        ("Labels missed", "worst", "labels missed", ~found & labels, 1 - shares),
        ("Best hits", "most probable", "right labels", found & labels, shares),
    )
    exhibits = [_labels(found, labels, precisions, names, csv_file(head, table))]
    for title, which, noun, chosen, sureness in kinds:
        rows, columns = np.nonzero(chosen)
        order = np.argsort(-sureness[rows, columns], kind="stable")[:_SHOWN]
        text, captions = "There is none.", []
        for i, k in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
            own = ", ".join(names[labels[i]]) or "with none"
            captions.append([f"{names[k]}, {percent(float(shares[i, k]))}", f"labelled {own}"])
        if captions:
            text = f"The {len(order)} {which} of {len(rows):,} {noun}. Below each picture: "
            text += f"that label with its probability, then the labels it has. {photos.about}"
        shown = photos.pictures(ids[rows[order]], columns[order], captions)
        exhibits.append(Exhibit(title=title, text=text, pictures=shown))
    return exhibits


def _labels(
    found: np.ndarray,
    labels: np.ndarray,
    precisions: np.ndarray,
    names: np.ndarray,
    predictions: bytes,
) -> Exhibit:
    """The table of labels, those with the lowest average precision first."""
    actual = labels.sum(axis=0)
    values = scores.of_labels(found, labels)
    present = np.flatnonzero(actual)
    order = present[np.argsort(precisions[present], kind="stable")].tolist()
    columns = np.stack([precisions, *values], axis=1)
    head = ["label", "images", "average precision", "precision", "recall", "F1"]
    rows = [[names[i], f"{actual[i]:,}", *map(percent, columns[i])] for i in order]
    means = map(percent, np.nan_to_num(columns[present]).mean(axis=0)) if order else [""] * 4
    bare = int((~labels.any(axis=1)).sum())
    text = f"The worst {CLASSES} of {len(order):,}" if len(order) > CLASSES else "All labels"
    text += ", the lowest average precision first; the other figures are for labels with a "
    text += f"probability above 50 %. {bare:,} of {len(labels):,} images have no label. For "
    text += "programs: per_class.csv has the same figures, predictions.csv has every image."
    if absent := len(names) - len(order):
        text += f" {absent:,} labels have no image to evaluate."
    table = [[names[i], actual[i], *(f"{x:.6f}" for x in columns[i])] for i in order]
    return Exhibit(
        title="Labels",
        text=text,
        columns=head,
        rows=[*rows[:CLASSES], ["mean over labels", f"{actual.sum():,}", *means]],
        has_mean=True,
        files={"per_class.csv": csv_file(head, table), "predictions.csv": predictions},
    )
