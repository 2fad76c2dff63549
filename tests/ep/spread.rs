//! One node, or several: most tests must pass on both.

use epoxide::transport::TransportKind;
use epoxide_testing::harness::NodeLinks;

/// Where the ranks of a test are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    OneNode,
    SeveralNodes,
}

impl Spread {
    /// Nodes of so many ranks with shared memory and two queues between them, where there are
    /// several.
    pub fn nodes(self, ranks_per_node: u32) -> Option<NodeLinks> {
        let nodes = NodeLinks { ranks_per_node, transport: TransportKind::Shm, queues: 2 };
        (self == Spread::SeveralNodes).then_some(nodes)
    }
}

/// Makes two tests of each function, which takes the spread.
macro_rules! in_every_spread {
    ($($name:ident,)+) => {
        mod intranode {
            $(#[test]
            fn $name() {
                super::$name(crate::spread::Spread::OneNode);
            })+
        }

        mod internode {
            $(#[test]
            fn $name() {
                super::$name(crate::spread::Spread::SeveralNodes);
            })+
        }
    };
}

pub(crate) use in_every_spread;
