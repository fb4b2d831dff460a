"""The story: the way in (`__main__`), the parts (`build`), the loop (`loop`), its process (`worker`)."""
