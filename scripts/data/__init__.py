"""The former names of preparations: `python -m scripts.data.coco` runs `scripts.prepare coco`."""
