"""The colours and the font of all pictures and of the report's page.

The colours are Okabe and Ito's (2008), which people with any form of colour blindness tell apart.
"""

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
SKY, YELLOW, GREY = "#56b4e9", "#e69f00", "#767676"
TRAIN, EVAL = BLUE, ORANGE
CLASSES = (ORANGE, BLUE, GREEN, PURPLE, SKY, YELLOW)  # by a class's number, modulo 6
DARK = (BLUE, "black")  # on these, text is white; on all others, black
# matplotlib has the first one: Latin, Greek, Cyrillic and Arabic letters.
FONTS = "DejaVu Sans, Verdana, sans-serif"
