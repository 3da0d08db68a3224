"""`evrun inspect`: is this checkpoint whole and sound, and is it the release?"""
