"""SSD, the single shot multibox detector (Liu et al. 2016, arXiv:1512.02325)."""
