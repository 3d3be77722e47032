"""stub"""


def fuse(graph, backward):
    return {}
