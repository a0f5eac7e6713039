"""The font of all pictures, and their colours: Okabe and Ito's, for any kind of colour vision."""

CLASSES = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # by number modulo 6
ORANGE, BLUE, GREEN, PURPLE, SKY, YELLOW = CLASSES
TRAIN, EVAL, GREY, DARK = BLUE, ORANGE, "#767676", (BLUE, "black")  # text is white on DARK alone
FONTS = "DejaVu Sans, Verdana, sans-serif"  # matplotlib has the first one
