"""The translators: Transformer and GNMT, in rooms of their own, and what both share.

A run goes through these files in this order:

    vocabulary.py     text to token ids and back; `subwords` has tensor2tensor's rules
    manifest.py       what manifest.json says about a folder of prepared records
    rows.py           the form of records of sentence pairs, and the faults that they may have
    translator.py     the benchmark that both rooms extend: keys, vocabulary, references
    transformer/      rows packed with several pairs: records, network, loss, beam search
    gnmt/             pairs in memory, in buckets of similar length: network, loss, beam search
    search.py         what both beam searches share
    evaluation.py     batches of sentences to translate, their references, and BLEU
    use.py            what a trained translator is good for: it translates, and shows translations

`preparation/` makes the vocabulary and the records from text; a run imports nothing of it.
"""
