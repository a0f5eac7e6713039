"""Detection of objects: SSD in `ssd`, Mask R-CNN in `mask_rcnn`, and what both share.

`opening` opens a split's records: as their manifest says, or after all were counted and checked. A
batch comes from `records` (images and true boxes in TFRecords) through
the room's `input_pipeline`; `images` normalises it. A room's `anchors` has the boxes that the
network predicts offsets from (`boxes`), `matching` gives each anchor its true box, `losses` has the
terms of the loss and `select` the hardest or largest of many numbers. To evaluate, `nms` suppresses
overlapping detections, and `scoring` scores them with pycocotools against the annotations that
`coco` reads. `detector` joins these for both rooms, whose keys are in `settings`. `backbone` begins
with the weights of a ResNet, `use` and `picture` draw detections with their `outlines`, which COCO
has in the field `segmentation`. `preparation` writes the records.
"""
