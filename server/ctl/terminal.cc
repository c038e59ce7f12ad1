#include "server/ctl/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/ctl/text.h"

namespace latentd::ctl {
namespace {

// The other screen, no cursor, no wrapping of lines that are wider than they seem.
constexpr char kEnter[] = "\x1b[?1049h\x1b[?25l\x1b[?7l";
constexpr char kLeave[] = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l";

// In one go, past stdio: another thread may be in the middle of it.
void WriteOut(const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t size = write(STDOUT_FILENO, text.data() + at, text.size() - at);
    if (size < 0 && errno != EINTR) return;
    if (size > 0) at += size;
  }
}

int Setting(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  int value = 0;
  return text != nullptr && absl::SimpleAtoi(text, &value) && value > 0 ? value : otherwise;
}

}  // namespace

bool IsTerminal(int fd) {
  static const bool terminal[] = {isatty(0) == 1, isatty(1) == 1, isatty(2) == 1};
  return terminal[fd];
}

TerminalSize GetTerminalSize() {
  winsize size = {};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 && size.ws_row > 0) {
    return {size.ws_col, size.ws_row};
  }
  const TerminalSize standard;
  return {Setting("COLUMNS", standard.columns), Setting("LINES", standard.rows)};
}

void FullScreen::Enter() {
  if (IsTerminal(STDIN_FILENO) && tcgetattr(STDIN_FILENO, &before_) == 0) {
    termios raw = before_;
    raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
    // Ctrl-Z is read as a key, so that the screen can be given back before the process stops.
    raw.c_cc[VSUSP] = _POSIX_VDISABLE;
    raw.c_cc[VMIN] = 1;
    raw.c_cc[VTIME] = 0;
    raw_ = tcsetattr(STDIN_FILENO, TCSANOW, &raw) == 0;
  }
  entered_ = true;
  WriteOut(kEnter);
}

void FullScreen::Leave() {
  if (!entered_.exchange(false)) return;
  if (raw_) tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  raw_ = false;
  WriteOut(kLeave);
}

void FullScreen::Suspend() {
  Leave();
  kill(0, SIGTSTP);  // the whole group, as the terminal would
  Enter();
}

void FullScreen::Draw(const std::vector<StyledLine>& lines, TerminalSize size) {
  std::string out = "\x1b[H";
  for (size_t i = 0; i < lines.size() && i < static_cast<size_t>(size.rows); ++i) {
    const StyledLine& line = lines[i];
    std::string text = FitText(line.text, size.columns);
    if (line.style != StyledLine::Style::kPlain) {
      text.append(size.columns - DisplayColumns(text), ' ');
      text = absl::StrCat(line.style == StyledLine::Style::kAlarm ? "\x1b[1;37;41m" : "\x1b[7m", text,
                          "\x1b[0m");
    }
    absl::StrAppend(&out, i > 0 ? "\r\n" : "", text, "\x1b[K");
  }
  WriteOut(out + "\x1b[J");
}

}  // namespace latentd::ctl
