"""The routes: every module here that defines ``router`` is part of the application (``server.app``)."""
