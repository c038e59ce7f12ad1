#include "server/rpc/listener.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/rpc/grpc_errors.h"
#include "server/rpc/peer.h"

namespace latentd {
namespace {

using ::testing::ElementsAre;
using ::testing::StartsWith;

std::string SocketPath() {
  static int number = 0;
  return absl::StrCat(::testing::TempDir(), "/listener_", getpid(), "_", number++, ".sock");
}

// A gRPC server with one service behind a Listener.
class HealthServer : public grpc::health::v1::Health::Service {
 public:
  explicit HealthServer(ListenerOptions options) {
    auto listener = Listener::Bind(options);
    EXPECT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
    grpc::ServerBuilder builder;
    builder.RegisterService(this);
    listener_->AddTo(builder, grpc::InsecureServerCredentials());
    server_ = builder.BuildAndStart();
    listener_->Start();
  }
  ~HealthServer() override {
    listener_->Stop();
    server_->Shutdown(std::chrono::system_clock::now());
  }

  grpc::Status Check(grpc::ServerContext* context, const grpc::health::v1::HealthCheckRequest*,
                     grpc::health::v1::HealthCheckResponse* response) override {
    peer = context->peer();
    response->set_status(grpc::health::v1::HealthCheckResponse::SERVING);
    return grpc::Status::OK;
  }

  Listener& listener() { return *listener_; }
  const std::string& address() const { return listener_->addresses()[0]; }
  std::string peer;

 private:
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<grpc::Server> server_;
};

// A connection of its own for each channel, so that one test does not use another's.
std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  context.set_wait_for_ready(true);
  grpc::health::v1::HealthCheckResponse response;
  return grpc::health::v1::Health::NewStub(channel)->Check(&context, {}, &response);
}

bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 2000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return condition();
}

// A plain connection; -1 when it is refused.
int PlainConnect(const std::string& address) {
  const Address parsed = *ParseAddress(address);
  sockaddr_in target = {};
  target.sin_family = AF_INET;
  target.sin_port = htons(static_cast<uint16_t>(parsed.port));
  target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd >= 0 && connect(fd, reinterpret_cast<sockaddr*>(&target), sizeof(target)) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

// The other side has closed: end of file, or a reset.
bool IsClosedByPeer(int fd) {
  char bytes[64];
  while (true) {
    const ssize_t n = recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (n > 0) continue;  // the server's first HTTP/2 frames
    return n == 0 || errno == ECONNRESET;
  }
}

// Runs `body` in a child process; its exit code.
int InChild(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Listener, ServesCallsOverTcp) {
  HealthServer server({.addresses = {"127.0.0.1:0"}});
  EXPECT_TRUE(Call(Connect(server.address())).ok());
  EXPECT_THAT(PeerOf(server.peer).address, StartsWith("ipv4:127.0.0.1:"));
  EXPECT_FALSE(PeerOf(server.peer).local);
}

TEST(Listener, ServesCallsOverAUnixSocket) {
  const std::string path = SocketPath();
  HealthServer server({.addresses = {"unix:" + path}});
  EXPECT_EQ(server.address(), "unix:" + path);
  EXPECT_TRUE(Call(Connect(server.address())).ok());
  EXPECT_TRUE(PeerOf(server.peer).local) << server.peer;
}

TEST(Listener, ListensOnSeveralAddressesAtOnce) {
  HealthServer server({.addresses = {"unix:" + SocketPath(), "127.0.0.1:0"}});
  for (const std::string& address : server.listener().addresses()) EXPECT_TRUE(Call(Connect(address)).ok());
}

TEST(Listener, AUnixSocketIsForOwnerAndGroupOnly) {
  const std::string path = SocketPath();
  auto listener = Listener::Bind({.addresses = {"unix:" + path}});
  ASSERT_TRUE(listener.ok()) << listener.status();
  struct stat file = {};
  ASSERT_EQ(stat(path.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 07777, 0660u);
}

TEST(Listener, StopRemovesTheSocketFileAndRefusesConnections) {
  const std::string path = SocketPath();
  HealthServer server({.addresses = {"unix:" + path, "127.0.0.1:0"}});
  const std::string tcp = server.listener().addresses()[1];
  server.listener().Stop();
  EXPECT_NE(access(path.c_str(), F_OK), 0);
  EXPECT_EQ(PlainConnect(tcp), -1);
}

TEST(Listener, StopLeavesOpenConnectionsAlone) {
  HealthServer server({.addresses = {"127.0.0.1:0"}});
  auto channel = Connect(server.address());
  ASSERT_TRUE(Call(channel).ok());
  server.listener().Stop();
  EXPECT_TRUE(Call(channel).ok());
}

TEST(Listener, ASecondDaemonOnTheSamePortIsRefused) {
  HealthServer server({.addresses = {"127.0.0.1:0"}});
  auto second = Listener::Bind({.addresses = {server.address()}});
  EXPECT_EQ(ErrorReason(second.status()), "ADDRESS_IN_USE") << second.status();
}

TEST(Listener, ASecondDaemonOnTheSameSocketIsRefusedAndTheFirstGoesOn) {
  HealthServer server({.addresses = {"unix:" + SocketPath()}});
  auto second = Listener::Bind({.addresses = {server.address()}});
  EXPECT_EQ(ErrorReason(second.status()), "ADDRESS_IN_USE") << second.status();
  EXPECT_TRUE(Call(Connect(server.address())).ok());
}

TEST(Listener, ASocketFileThatNobodyListensOnIsReplaced) {
  const std::string path = SocketPath();
  // What a daemon that was killed leaves behind.
  ASSERT_EQ(InChild([&] {
              auto listener = Listener::Bind({.addresses = {"unix:" + path}});
              return listener.ok() && listener->release() != nullptr ? 0 : 1;
            }),
            0);
  ASSERT_EQ(access(path.c_str(), F_OK), 0);
  HealthServer server({.addresses = {"unix:" + path}});
  EXPECT_TRUE(Call(Connect(server.address())).ok());
}

TEST(Listener, AFileOfAnotherKindIsNotReplaced) {
  const std::string path = SocketPath();
  std::ofstream(path) << "precious";
  auto listener = Listener::Bind({.addresses = {"unix:" + path}});
  EXPECT_EQ(ErrorReason(listener.status()), "ADDRESS_IN_USE");
  EXPECT_EQ(access(path.c_str(), F_OK), 0);
}

TEST(Listener, AnotherDaemonsSocketFileIsNotRemoved) {
  const std::string path = SocketPath();
  auto first = Listener::Bind({.addresses = {"unix:" + path}});
  ASSERT_TRUE(first.ok());
  ASSERT_EQ(unlink(path.c_str()), 0);
  auto second = Listener::Bind({.addresses = {"unix:" + path}});
  ASSERT_TRUE(second.ok()) << second.status();
  (*first)->Stop();
  EXPECT_EQ(access(path.c_str(), F_OK), 0);
}

TEST(Listener, MakesTheSocketsFolder) {
  const std::string folder = SocketPath() + ".d";
  auto listener = Listener::Bind({.addresses = {"unix:" + folder + "/x.sock"}});
  EXPECT_TRUE(listener.ok()) << listener.status();
}

TEST(Listener, AWrongAddressIsAnError) {
  EXPECT_EQ(ErrorReason(Listener::Bind({.addresses = {"nonsense"}}).status()), "INVALID_ADDRESS");
  EXPECT_EQ(ErrorReason(Listener::Bind({.addresses = {"no-such-host.invalid:1"}}).status()),
            "INVALID_ADDRESS");
}

TEST(Listener, CountsOpenConnections) {
  HealthServer server({.addresses = {"127.0.0.1:0", "unix:" + SocketPath()}});
  for (const std::string& address : server.listener().addresses()) {
    auto channel = Connect(address);
    ASSERT_TRUE(Call(channel).ok());
    EXPECT_EQ(server.listener().stats().open, 1);
    channel.reset();
    EXPECT_TRUE(Eventually([&] { return server.listener().stats().open == 0; })) << address;
  }
  EXPECT_EQ(server.listener().stats().accepted, 2);
}

TEST(Listener, ConnectionsBeyondTheLimitAreClosedUntilOthersEnd) {
  HealthServer server({.addresses = {"127.0.0.1:0"}, .max_connections = 2});
  auto first = Connect(server.address()), second = Connect(server.address());
  ASSERT_TRUE(Call(first).ok() && Call(second).ok());
  const int third = PlainConnect(server.address());
  EXPECT_TRUE(Eventually([&] { return IsClosedByPeer(third); }));
  EXPECT_EQ(server.listener().stats().refused, 1);
  close(third);
  second.reset();
  EXPECT_TRUE(Call(Connect(server.address())).ok());
  EXPECT_TRUE(Call(first).ok());
}

TEST(Listener, SilentConnectionsMakeRoomForOthers) {
  HealthServer server({.addresses = {"127.0.0.1:0"}, .max_connections = 4});
  auto first = Connect(server.address());
  ASSERT_TRUE(Call(first).ok());
  std::vector<int> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(PlainConnect(server.address()));
  EXPECT_TRUE(Call(Connect(server.address())).ok());
  EXPECT_TRUE(Call(first).ok()) << "a connection that is used stays";
  EXPECT_GE(server.listener().stats().displaced, 90);
  for (int fd : silent) close(fd);
}

TEST(Listener, EachListenerKeepsSomeConnections) {
  HealthServer server({.addresses = {"127.0.0.1:0", "unix:" + SocketPath()}, .max_connections = 8});
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < 7; ++i) {
    channels.push_back(Connect(server.address()));
    ASSERT_TRUE(Call(channels.back()).ok());
  }
  const int eighth = PlainConnect(server.address());
  EXPECT_TRUE(Eventually([&] { return IsClosedByPeer(eighth); }));
  close(eighth);
  EXPECT_TRUE(Call(Connect(server.listener().addresses()[1])).ok());
}

TEST(Listener, APeerHasSomeConnectionsAtMost) {
  HealthServer server({.addresses = {"127.0.0.1:0", "unix:" + SocketPath()},
                       .max_connections = 8,
                       .max_connections_per_peer = 2});
  auto first = Connect(server.address()), second = Connect(server.address());
  ASSERT_TRUE(Call(first).ok() && Call(second).ok());
  const int third = PlainConnect(server.address());
  EXPECT_TRUE(Eventually([&] { return IsClosedByPeer(third); }));
  close(third);
  EXPECT_TRUE(Call(Connect(server.listener().addresses()[1])).ok()) << "a user is another peer";
}

TEST(Listener, AConnectionThatSpeaksNoHttp2IsClosed) {
  HealthServer server({.addresses = {"127.0.0.1:0"}});
  const int fd = PlainConnect(server.address());
  ASSERT_EQ(write(fd, "GET / HTTP/1.1\r\n\r\n", 18), 18);
  EXPECT_TRUE(Eventually([&] { return IsClosedByPeer(fd); }));
  EXPECT_TRUE(Eventually([&] { return server.listener().stats().ended == 1; }));
  close(fd);
}

TEST(Listener, ConnectionsThatSayNothingEnd) {
  HealthServer server({.addresses = {"127.0.0.1:0"}, .http2 = {.request_timeout = absl::Milliseconds(100)}});
  const int fd = PlainConnect(server.address());
  EXPECT_TRUE(Eventually([&] { return IsClosedByPeer(fd); }));
  close(fd);
}

TEST(Listener, ACallThatTheRelayRefusesHasAReason) {
  HealthServer server({.addresses = {"127.0.0.1:0"}, .http2 = {.max_message_bytes = 100}});
  auto channel = Connect(server.address());
  grpc::ClientContext context;
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(std::string(1000, 'x'));
  grpc::health::v1::HealthCheckResponse response;
  const absl::Status refused =
      FromGrpcStatus(grpc::health::v1::Health::NewStub(channel)->Check(&context, request, &response));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(refused), "MESSAGE_TOO_LARGE") << refused;
  EXPECT_TRUE(Call(channel).ok()) << "the connection goes on";
}

// Runs only as the child process of the test below: serves with few descriptors until its stdin is closed.
TEST(ListenerChild, DISABLED_ServesWithFewDescriptors) {
  HealthServer server({.addresses = {"127.0.0.1:0"}});
  ASSERT_TRUE(Call(Connect(server.address())).ok());
  const rlimit few = {40, 40};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::printf("address %s\n", server.address().c_str());
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  std::printf("refused %d\n", server.listener().stats().refused > 0);
}

TEST(Listener, AnswersAgainAfterDescriptorsRanOut) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizers' own checks need descriptors";
#endif
  int to_child[2], from_child[2];
  ASSERT_EQ(pipe(to_child), 0);
  ASSERT_EQ(pipe(from_child), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(to_child[0], 0);
    dup2(from_child[1], 1);
    for (int fd : {to_child[0], to_child[1], from_child[0], from_child[1]}) close(fd);
    execl("/proc/self/exe", "listener_test", "--gtest_filter=ListenerChild.*",
          "--gtest_also_run_disabled_tests", nullptr);
    _exit(127);
  }
  close(to_child[0]);
  close(from_child[1]);
  FILE* lines = fdopen(from_child[0], "r");
  char line[256], address[256] = "";
  while (std::fgets(line, sizeof(line), lines) != nullptr &&
         std::sscanf(line, "address %255s", address) != 1) {
  }
  ASSERT_STRNE(address, "");

  std::vector<int> connections;
  for (int i = 0; i < 200; ++i) connections.push_back(PlainConnect(address));
  // Those beyond what the child can hold are told so.
  EXPECT_TRUE(Eventually(
      [&] { return std::count_if(connections.begin(), connections.end(), IsClosedByPeer) > 100; }));
  for (int fd : connections) close(fd);
  EXPECT_TRUE(Call(Connect(address)).ok());

  close(to_child[1]);
  int refused = 0;
  while (std::fgets(line, sizeof(line), lines) != nullptr && std::sscanf(line, "refused %d", &refused) != 1) {
  }
  EXPECT_EQ(refused, 1);
  std::fclose(lines);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Listener, TakesTheSocketsThatSystemdPasses) {
  const std::string path = SocketPath();
  EXPECT_EQ(InChild([&] {
              // As systemd does: the socket is descriptor 3 and the variables name this process.
              const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
              sockaddr_un address = {};
              address.sun_family = AF_UNIX;
              path.copy(address.sun_path, sizeof(address.sun_path) - 1);
              if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 || listen(fd, 5) != 0)
                return 1;
              if (fd != 3 && dup2(fd, 3) != 3) return 2;
              setenv("LISTEN_PID", absl::StrCat(getpid()).c_str(), 1);
              setenv("LISTEN_FDS", "1", 1);
              auto listener = Listener::Bind({.addresses = {"127.0.0.1:1"}});
              if (!listener.ok()) return 3;
              if ((*listener)->addresses() != std::vector<std::string>{"unix:" + path}) return 4;
              (*listener)->Stop();
              // The file is systemd's.
              return access(path.c_str(), F_OK) == 0 ? 0 : 5;
            }),
            0);
}

TEST(Listener, SocketsThatSystemdPassedToAnotherProcessAreLeftAlone) {
  EXPECT_EQ(InChild([] {
              setenv("LISTEN_PID", "1", 1);
              setenv("LISTEN_FDS", "1", 1);
              auto listener = Listener::Bind({.addresses = {"127.0.0.1:0"}});
              return listener.ok() && (*listener)->addresses().size() == 1 ? 0 : 1;
            }),
            0);
}

}  // namespace
}  // namespace latentd
