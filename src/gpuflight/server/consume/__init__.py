"""Rounds of many hosts, from a topic into the store that all servers read: ``gpuflight-server --consume``.

``intake`` puts rounds together and knows what may be committed, ``merge`` decides what a round does to its namespace,
``writers`` do it in threads of their own, ``loop`` holds them together; none of these knows Kafka or a database.
"""
