"""Detection of objects: boxes, matching, suppression and selection, with static shapes."""
