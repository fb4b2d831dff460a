"""The story: the way in (`__main__`), the parts (`build`), the loop, its process (`worker`)."""
