"""Detection of objects: SSD in `ssd`, Mask R-CNN in `mask_rcnn`, and what both share.

A batch comes from `records` (images and true boxes in TFRecords) through the room's
`input_pipeline`; `images` normalises it. A room's `anchors` has the boxes that the network predicts
offsets from (`boxes`), `matching` gives each anchor its true box, `losses` has the terms of the
loss and `select` the hardest or largest of many numbers. To evaluate, `nms` suppresses overlapping
detections, and `coco` reads the annotations and scores with pycocotools. `detector` joins these for
both rooms, `backbone` begins with the weights of a ResNet, `use` and `picture` draw detections with
their `outlines`, which COCO has in the field `segmentation`. `preparation` writes the records.
"""
