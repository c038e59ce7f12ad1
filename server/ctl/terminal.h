// latentctl: the terminal.
#ifndef LATENTD_SERVER_CTL_TERMINAL_H_
#define LATENTD_SERVER_CTL_TERMINAL_H_

#include <termios.h>

#include <atomic>
#include <string>
#include <vector>

namespace latentd::ctl {

// Of file descriptors 0, 1 and 2.
bool IsTerminal(int fd);

struct TerminalSize {
  int columns = 80;
  int rows = 24;
};

// Of stdout; where that is no terminal, what COLUMNS and LINES say, or 80 × 24.
TerminalSize GetTerminalSize();

struct StyledLine {
  enum class Style { kPlain, kHeading, kAlarm };
  std::string text;
  Style style = Style::kPlain;
};

// The whole of stdout's terminal, from Enter() to Leave(). Keys come one by one and are not shown.
class FullScreen {
 public:
  FullScreen() = default;
  ~FullScreen() { Leave(); }
  FullScreen(const FullScreen&) = delete;
  FullScreen& operator=(const FullScreen&) = delete;

  void Enter();
  // Everything is as before. Any thread, also beside the others.
  void Leave();
  // Leaves, stops the process as Ctrl-Z does, and enters again when it goes on.
  void Suspend();

  void Draw(const std::vector<StyledLine>& lines, TerminalSize size);

 private:
  std::atomic<bool> entered_ = false;
  bool raw_ = false;
  termios before_ = {};
};

}  // namespace latentd::ctl

#endif  // LATENTD_SERVER_CTL_TERMINAL_H_
