"""What a job of `launch gce` is, wants and sees."""
