"""What a data set is read from: text files, documents, images, objects of the user."""
