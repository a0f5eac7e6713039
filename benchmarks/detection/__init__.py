"""Detection of objects: SSD in `ssd`, Mask R-CNN in `mask_rcnn`, and what both share.

`records` opens the records of a split, as their manifest describes them or after all were counted
and checked, and reads images and true boxes from them; the `input_pipeline` of each detector makes
the batches. `boxes` has the deltas between a box and its anchor, matches a true box with each
anchor, and suppresses overlapping detections (NMS). `losses` has the terms of the loss, `selection`
the hardest or largest of many numbers. To evaluate, `scoring` scores detections and their
masks with pycocotools against the annotations that `coco` reads and looks through for
mistakes. `detector` joins these for both detectors, whose keys are in `settings`. `weights` loads
the weights of a ResNet or of another library. `use` finds objects on photos; `exhibits` shows the
detections beside the true objects. `preparation` writes the records.
"""
