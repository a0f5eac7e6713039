"""Detection: boxes, matching, suppression, and COCO's annotations and score."""
