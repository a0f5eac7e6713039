"""Detects objects with SSD: a ResNet-34 with boxes of fixed places and shapes, on COCO."""
