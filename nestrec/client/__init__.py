"""HTTP clients of `nestrec serve`: `Client` (blocking) and `AsyncClient` (asyncio).

Requires the extra `client`; in a clone of the repository: `pip install '.[client]'`.
"""

from nestrec.client.attempts import RequestError as RequestError
from nestrec.client.attempts import ServerBusyError as ServerBusyError
from nestrec.client.clients import AsyncClient as AsyncClient
from nestrec.client.clients import Client as Client
from nestrec.client.clients import UserHistory as UserHistory
