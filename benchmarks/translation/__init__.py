"""The translators, Transformer and GNMT, in a package each, and what both share.

A run goes through these files in this order:

    vocabulary.py     text to token ids and back; its subwords have tensor2tensor's rules
    schema.py         records of sentence pairs: form, errors, vocabulary, manifest.json
    translator.py     the benchmark that both packages extend: keys, vocabulary, references
    transformer/      rows packed with several pairs: records, network, loss, beam search
    gnmt/             pairs in memory, in buckets of similar length: network, loss, beam search
    losses.py         cross-entropy with label smoothing, in slices
    reductions.py     sums and products in the form that is fastest on each kind of device
    beam_search.py    what both beam searches share
    evaluation.py     batches of sentences to translate, their references, and scores
    use.py            what a trained translator is good for: it translates, and shows translations

`preparation/` makes the vocabulary and the records from text; a run imports nothing of it.
"""
