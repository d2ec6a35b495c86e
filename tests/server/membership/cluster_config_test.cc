#include "server/membership/cluster_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "base/config.h"
#include "base/status.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

v1::ClusterConfig Etcd() {
  v1::ClusterConfig config;
  config.mutable_etcd()->add_endpoints("10.0.0.1:2379");
  config.set_plaintext(true);
  CompleteClusterConfig("n1", &config);
  return config;
}

v1::ClusterConfig Static() {
  v1::ClusterConfig config;
  for (const char* name : {"n1", "n2"}) {
    v1::ClusterMember* member = config.add_members();
    member->set_name(name);
    member->set_address(std::string(name) + ".example:9465");
  }
  config.set_plaintext(true);
  CompleteClusterConfig("n1", &config);
  return config;
}

TEST(ClusterConfig, Defaults) {
  const v1::ClusterConfig etcd = Etcd();
  EXPECT_EQ(etcd.name(), "default");
  EXPECT_EQ(etcd.listen_address(), "0.0.0.0:9465");
  EXPECT_EQ(etcd.advertise_address(), "n1:9465");
  EXPECT_EQ(etcd.etcd().lease_ttl_ms(), 10'000u);
  EXPECT_EQ(etcd.etcd().request_timeout_ms(), 2'000u);
  EXPECT_EQ(EtcdPrefix(etcd), "/holdfast/default/");
  EXPECT_TRUE(CheckClusterConfig("n1", etcd).ok()) << CheckClusterConfig("n1", etcd);
  EXPECT_EQ(Static().advertise_address(), "n1.example:9465");
  EXPECT_TRUE(CheckClusterConfig("n1", Static()).ok()) << CheckClusterConfig("n1", Static());
  v1::ClusterConfig alone;
  alone.set_plaintext(true);
  CompleteClusterConfig("n1", &alone);
  EXPECT_TRUE(CheckClusterConfig("n1", alone).ok());
}

TEST(ClusterConfig, AnyPortIsPublishedAsWhatItTurnsOutToBe) {
  v1::ClusterConfig config;
  config.set_listen_address("127.0.0.1:0");
  CompleteClusterConfig("n1", &config);
  EXPECT_EQ(config.advertise_address(), "n1:0");
  EXPECT_TRUE(CheckClusterConfig("n1", config).ok()) << CheckClusterConfig("n1", config);
  EXPECT_EQ(PublishedAddress(config, "127.0.0.1:4711"), "n1:4711");
  config.set_advertise_address("proxy:9465");
  EXPECT_TRUE(CheckClusterConfig("n1", config).ok()) << CheckClusterConfig("n1", config);
  EXPECT_EQ(PublishedAddress(config, "127.0.0.1:4711"), "proxy:9465");
}

TEST(ClusterConfig, TlsIsAllOrNothing) {
  v1::ClusterConfig config = Etcd();
  config.clear_plaintext();
  config.mutable_tls()->set_ca_file("/ca.pem");
  config.mutable_tls()->set_cert_file("/cert.pem");
  config.mutable_tls()->set_key_file("/key.pem");
  EXPECT_TRUE(CheckClusterConfig("n1", config).ok()) << CheckClusterConfig("n1", config);
}

TEST(ClusterConfig, PlainTextBeyondLoopbackHasToBeSaid) {
  v1::ClusterConfig config = Static();
  config.clear_plaintext();
  for (const char* address : {"0.0.0.0:9465", "[::]:9465", "10.0.0.1:9465", "n1.example:9465",
                              "localhost:9465", "[::2]:9465", "128.0.0.1:9465", "0.0.0.0:0"}) {
    config.set_listen_address(address);
    const absl::Status refused = CheckClusterConfig("n1", config);
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << address;
    EXPECT_THAT(Message(refused), HasSubstr("cluster.tls: there is none"));
    EXPECT_THAT(Message(refused), HasSubstr("cluster.plaintext: true"));
  }
  for (const char* address : {"127.0.0.1:9465", "127.8.8.8:9465", "[::1]:9465", "127.0.0.1:0"}) {
    config.set_listen_address(address);
    EXPECT_EQ(CheckClusterConfig("n1", config), absl::OkStatus()) << address;
  }
  config.set_listen_address("0.0.0.0:9465");
  config.set_plaintext(true);
  EXPECT_EQ(CheckClusterConfig("n1", config), absl::OkStatus());
  config.mutable_tls()->set_ca_file("/ca.pem");
  config.mutable_tls()->set_cert_file("/cert.pem");
  config.mutable_tls()->set_key_file("/key.pem");
  EXPECT_THAT(Message(CheckClusterConfig("n1", config)), HasSubstr("which of both?"));
  config.set_plaintext(false);
  EXPECT_EQ(CheckClusterConfig("n1", config), absl::OkStatus());
}

TEST(ClusterConfig, IsReadFromYaml) {
  v1::ClusterConfig config;
  const absl::Status status = ParseConfig(R"(
name: prod
labels: [{name: zone, value: z1}, {name: rack, value: r7}]
etcd:
  endpoints: [10.0.0.1:2379, "https://etcd-2:2379"]
  lease_ttl_ms: 15s
plaintext: true
)",
                                          "test.yaml", config);
  ASSERT_TRUE(status.ok()) << status;
  CompleteClusterConfig("n1", &config);
  EXPECT_TRUE(CheckClusterConfig("n1", config).ok());
  EXPECT_EQ(config.etcd().lease_ttl_ms(), 15'000u);
  EXPECT_EQ(LabelsOf(config.labels()), (std::vector<NodeLabel>{{"rack", "r7"}, {"zone", "z1"}}));
  EXPECT_TRUE(ParseEtcdEndpoint(config.etcd(), config.etcd().endpoints(1))->tls);
  EXPECT_FALSE(ParseEtcdEndpoint(config.etcd(), config.etcd().endpoints(0))->tls);
}

using Spoil = std::function<void(v1::ClusterConfig*)>;

std::string Refusal(v1::ClusterConfig config, const Spoil& spoil, const std::string& node = "n1") {
  spoil(&config);
  const absl::Status status = CheckClusterConfig(node, config);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return Message(status);
}

TEST(ClusterConfig, WhatCannotBeIsNamed) {
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->set_name("a/b"); }), HasSubstr("cluster.name"));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->set_listen_address("x"); }),
              HasSubstr("cluster.listen_address"));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->set_advertise_address("h:0"); }),
              HasSubstr("cluster.advertise_address"));
  EXPECT_THAT(Refusal(
                  Etcd(), [](auto*) {}, "n 1"),
              HasSubstr("node name"));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->add_labels()->set_name("zone"); }),
              HasSubstr("label"));
  EXPECT_THAT(Refusal(Etcd(),
                      [](auto* c) {
                        for (const char* value : {"1", "2"}) {
                          v1::Label* label = c->add_labels();
                          label->set_name("row");
                          label->set_value(value);
                        }
                      }),
              HasSubstr("'row' twice: a node has one value of it"));
  EXPECT_THAT(Refusal(Static(),
                      [](auto* c) {
                        v1::Label* listed = c->mutable_members(0)->add_labels();
                        listed->set_name("row");
                        listed->set_value("1");
                        v1::Label* own = c->add_labels();
                        own->set_name("row");
                        own->set_value("2");
                      }),
              HasSubstr("cluster.labels: they are not those that cluster.members gives"));
  EXPECT_THAT(Refusal(Static(), [](auto* c) { c->mutable_etcd()->add_endpoints("h:1"); }),
              HasSubstr("not both"));
  EXPECT_THAT(Refusal(
                  Static(), [](auto*) {}, "n3"),
              HasSubstr("'n3' (node_name), is not listed"));
  EXPECT_THAT(Refusal(Static(), [](auto* c) { c->mutable_members(1)->set_name("n1"); }),
              HasSubstr("listed twice"));
  EXPECT_THAT(
      Refusal(Static(), [](auto* c) { c->mutable_members(1)->set_address("n1.example:9465"); }),
      HasSubstr("another member's"));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->mutable_etcd()->clear_endpoints(); }),
              HasSubstr("endpoints"));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->mutable_etcd()->add_endpoints("ftp://h:1"); }),
              HasSubstr("endpoints"));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->mutable_etcd()->set_prefix("/x"); }),
              HasSubstr("prefix"));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->mutable_etcd()->set_ca_file("ca.pem"); }),
              HasSubstr("absolute"));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->mutable_etcd()->set_cert_file("/c"); }),
              HasSubstr("go together"));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->mutable_etcd()->set_user("u"); }),
              HasSubstr("go together"));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->mutable_etcd()->set_lease_ttl_ms(1500); }),
              HasSubstr("lease_ttl_ms"));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->mutable_etcd()->set_request_timeout_ms(6'000); }),
              HasSubstr("request_timeout_ms"));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->mutable_tls()->set_ca_file("/ca"); }),
              HasSubstr("cluster.tls: ca_file, cert_file and key_file go together"));
  EXPECT_THAT(Refusal(Etcd(),
                      [](auto* c) {
                        c->mutable_tls()->set_ca_file("/ca");
                        c->mutable_tls()->set_cert_file("/cert");
                        c->mutable_tls()->set_key_file("key");
                      }),
              HasSubstr("cluster.tls.key_file: 'key' is not an absolute path"));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->mutable_tls(); }), HasSubstr("cluster.tls: "));
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->set_advertise_address("n1:0"); }),
              HasSubstr("cluster.advertise_address: 'n1:0' is not HOST:PORT"));
  EXPECT_THAT(Refusal(Etcd(),
                      [](auto* c) {
                        c->mutable_etcd()->set_ca_file("/ca");
                        c->mutable_etcd()->add_endpoints("http://h:1");
                      }),
              HasSubstr("would not be encrypted"));
}

TEST(ClusterConfig, AnAddressThatNamesNoHostIsNotPublished) {
  for (const std::string host :
       {"0.0.0.0", "[::]", "[0:0::0]", "[::%1]", "[::ffff:0.0.0.0]", "0", "0.0"}) {
    const auto advertise = [&](auto* c) { c->set_advertise_address(host + ":9465"); };
    EXPECT_EQ(
        Refusal(Etcd(), advertise),
        "cluster.advertise_address: '" + host +
            ":9465' stands for every address of a machine and leads to none: give the name "
            "or address at which other nodes reach this one; listen_address may be such a one")
        << host;
    EXPECT_THAT(
        Refusal(Static(), [&](auto* c) { c->mutable_members(1)->set_address(host + ":9465"); }),
        HasSubstr("cluster.members (n2): '" + host + ":9465' stands for every address"));
  }
  // Of this node, too, whose address was taken from there: nobody has set advertise_address.
  for (const std::string address : {"0.0.0.0:9465", "n1.example:0", ""}) {
    EXPECT_THAT(Refusal(Static(),
                        [&](auto* c) {
                          c->mutable_members(0)->set_address(address);
                          c->set_advertise_address(address);
                        }),
                HasSubstr("cluster.members"))
        << address;
  }
  // Nor with the port that is found for it.
  EXPECT_THAT(Refusal(Etcd(),
                      [](auto* c) {
                        c->set_listen_address("0.0.0.0:0");
                        c->set_advertise_address("0.0.0.0:0");
                      }),
              HasSubstr("cluster.advertise_address: '0.0.0.0:0' stands for every address"));
  // Where a node listens, and what only looks like one.
  for (const std::string host : {"[::1]", "10.0.0.0", "0.example", "[::ffff:10.0.0.1]"}) {
    v1::ClusterConfig config = Etcd();
    config.set_listen_address("[::]:9465");
    config.set_advertise_address(host + ":9465");
    EXPECT_EQ(CheckClusterConfig("n1", config), absl::OkStatus());
  }
}

TEST(ClusterConfig, AListSaysWhereItsNodesAre) {
  EXPECT_EQ(
      Refusal(Static(), [](auto* c) { c->set_advertise_address("n1.other:9465"); }),
      "cluster.advertise_address: 'n1.other:9465' is not what cluster.members says of this node, "
      "'n1': n1.example:9465, where the others look for it; leave advertise_address out, or give "
      "that address in the list, on every node alike");
  EXPECT_THAT(Refusal(Static(),
                      [](auto* c) {
                        c->set_listen_address("0.0.0.0:0");
                        c->set_advertise_address("n1.example:0");
                      }),
              HasSubstr("cluster.advertise_address: 'n1.example:0' is not what cluster.members"));
  v1::ClusterConfig same = Static();
  same.set_advertise_address("N1.Example:9465");
  EXPECT_EQ(CheckClusterConfig("n1", same), absl::OkStatus()) << "names of hosts have no case";
  EXPECT_THAT(
      Refusal(Static(), [](auto* c) { c->mutable_members(1)->set_address("N1.example:9465"); }),
      HasSubstr("cluster.members (n2): address N1.example:9465 is another member's, too"));
}

TEST(ClusterConfig, EachServerOfEtcdIsNamedOnce) {
  for (const std::string again :
       {"etcd-1:2379", "ETCD-1:2379", "http://etcd-1:2379", "https://etcd-1:2379"}) {
    EXPECT_EQ(Refusal(Etcd(),
                      [&](auto* c) {
                        c->mutable_etcd()->add_endpoints("etcd-1:2379");
                        c->mutable_etcd()->add_endpoints(again);
                      }),
              "cluster.etcd.endpoints: '" + again +
                  "' is the same server as 'etcd-1:2379'; name each one once");
  }
  v1::ClusterConfig config = Etcd();
  config.mutable_etcd()->add_endpoints("10.0.0.1:2380");
  config.mutable_etcd()->add_endpoints("http://10.0.0.2:2379");
  EXPECT_EQ(CheckClusterConfig("n1", config), absl::OkStatus());
  EXPECT_THAT(Refusal(Etcd(), [](auto* c) { c->mutable_etcd()->add_endpoints("ftp://h:1"); }),
              HasSubstr("cluster.etcd.endpoints: 'ftp://h:1' is not HOST:PORT"));
}

TEST(ClusterConfig, ThePrefixOfEtcdsKeysIsShownAsItIs) {
  const auto refused = [](const std::string& prefix) {
    return Refusal(Etcd(), [&](auto* c) { c->mutable_etcd()->set_prefix(prefix); });
  };
  EXPECT_EQ(refused(""),
            "cluster.etcd.prefix: '' would mix our keys with everybody's; give one that ends with "
            "a slash, or leave it out for '/holdfast/'");
  const std::string rules = "': printable ASCII, a slash at the end, at most 512 bytes";
  EXPECT_EQ(refused(std::string("/a\0b/", 5)), "cluster.etcd.prefix: '/a\\x00b/" + rules);
  EXPECT_EQ(refused("/a\n\x1b\x7f/"), "cluster.etcd.prefix: '/a\\x0a\\x1b\\x7f/" + rules);
  EXPECT_EQ(refused("/\xff/"), "cluster.etcd.prefix: '/\\xff/" + rules);
  EXPECT_EQ(refused("/a b/"), "cluster.etcd.prefix: '/a b/" + rules);
  EXPECT_EQ(refused("/x"), "cluster.etcd.prefix: '/x" + rules);
}

TEST(ClusterConfig, AnEmptyPrefixIsNoneThatWasLeftOut) {
  v1::ClusterConfig config;
  const absl::Status status =
      ParseConfig("etcd: {endpoints: [h:1], prefix: ''}", "test.yaml", config);
  ASSERT_TRUE(status.ok()) << status;
  CompleteClusterConfig("n1", &config);
  EXPECT_THAT(Message(CheckClusterConfig("n1", config)), HasSubstr("cluster.etcd.prefix: ''"));
}

}  // namespace
}  // namespace holdfast
