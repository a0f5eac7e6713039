"""Detection of objects: SSD in `ssd`, Mask R-CNN in `mask_rcnn`, and what both share.

`records` opens a split's records, as their manifest says or after all were counted and checked, and
reads images and true boxes from them; a detector's own `input_pipeline` makes the batches. `boxes`
has the offsets between a box and its anchor, gives each anchor its true box, and suppresses
overlapping detections. `losses` has the terms of the loss, `selection` the hardest or largest of
many numbers. To evaluate, `scoring` scores detections with pycocotools against the annotations that
`coco` reads. `survey` looks for labels that cannot be meant, and for objects that no anchor fits.
`detector` joins these for both detectors, whose keys are in `settings`. `weights` begins with the
weights of a ResNet or of another library. `use` finds objects on photos; `exhibits` compares
detections with the true objects, and shows both. `preparation` writes the records.
"""
