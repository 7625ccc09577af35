from gpuflight.events.recorder.process import init as init
from gpuflight.events.recorder.process import shutdown as shutdown
from gpuflight.events.recorder.scopes import scope as scope

__version__: str
