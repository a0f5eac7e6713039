"""A page to try a trained model on: what `python -m scripts.demo` opens in a browser.

`answers` uses the model as predict.py does. `page` shows the answers with NiceGUI, which is not
among the requirements of training.
"""
