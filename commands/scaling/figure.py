def draw(file, points, law, **kw):
    file.write(b"")
