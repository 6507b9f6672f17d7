import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.trees import Forest, infer_forest, parent_after_child
from tests.trees import ancestors


@st.composite
def forests(draw):
    """Parents of up to 64 tokens, one or several roots, in any numbering."""
    t = draw(st.integers(1, 64))
    parents = [-1] + [draw(st.integers(-1, i - 1)) for i in range(1, t)]
    order = draw(st.permutations(range(t)))
    renumbered = [0] * t
    for i, parent in enumerate(parents):
        renumbered[order[i]] = -1 if parent < 0 else order[parent]
    return renumbered


@given(forests())
def test_a_forest_is_read_back_from_its_mask(parents):
    forest = infer_forest(ancestors(parents))
    assert forest is not None
    assert list(forest.parents) == parents


@given(forests(), st.data())
def test_a_changed_cell_never_gives_the_same_forest(parents, data):
    mask = ancestors(parents)
    i, j = (data.draw(st.integers(0, len(parents) - 1)) for _ in range(2))
    mask[i, j] ^= True
    forest = infer_forest(mask)
    assert forest is None or list(forest.parents) != parents


def test_masks_that_are_no_forest():
    assert infer_forest(np.ones((3, 3), np.bool_)) is None  # all see all
    assert infer_forest(np.zeros((2, 2), np.bool_)) is None  # a token that does not see itself
    skips_its_grandparent = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]], np.bool_)
    assert infer_forest(skips_its_grandparent) is None
    two_see_each_other = np.array([[1, 1], [1, 1]], np.bool_)
    assert infer_forest(two_see_each_other) is None


def test_depth_roots_and_children():
    forest = Forest((-1, 0, 0, 1, -1))
    assert (forest.depth, forest.roots, forest.children(0)) == (3, [0, 4], [1, 2])
    assert Forest(()).depth == 0


def test_parent_after_child_is_seen():
    assert parent_after_child(ancestors([1, -1]))
    assert not parent_after_child(ancestors([-1, 0]))
