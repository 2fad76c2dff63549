//! Readable names of kernels, and kernels by a part of their name.

use anyhow::{Result, bail};
pub use epoxide_vgpu::readable_name as readable;

/// The kernel whose name is `wanted`, or the only one whose name in the source contains `wanted`.
/// Without `wanted`, the only kernel.
pub fn find(all: &[&str], wanted: Option<&str>) -> Result<String> {
    let list =
        |names: &[&str]| names.iter().map(|name| format!("\n  {}", readable(name))).collect::<String>();
    let Some(wanted) = wanted else {
        return match all {
            [] => bail!("the file has no kernel"),
            [one] => Ok((*one).to_owned()),
            _ => bail!("the file has several kernels, so name one of them:{}", list(all)),
        };
    };
    let exact = all.iter().find(|name| **name == wanted || readable(name) == wanted);
    if let Some(name) = exact {
        return Ok((*name).to_owned());
    }
    let fits = |name: &&str| readable(name).contains(wanted) || name.contains(wanted);
    let found: Vec<&str> = all.iter().copied().filter(fits).collect();
    match found.as_slice() {
        [] => bail!("no kernel has '{wanted}' in its name; the file has:{}", list(all)),
        [one] => Ok((*one).to_owned()),
        _ => bail!("several kernels have '{wanted}' in their names:{}", list(&found)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_three_compilers_are_readable() {
        assert_eq!(readable("_Z5saxpyfPKfPfj"), "saxpy(float, float const*, float*, unsigned int)");
        assert_eq!(readable("_ZN4core3fmt5write17h0123456789abcdefE"), "core::fmt::write");
        assert_eq!(readable("triton_kernel"), "triton_kernel");
    }

    #[test]
    fn a_kernel_is_found_by_a_part_of_its_name() {
        let two = ["_Z3addPfj", "_Z4add2Pfj"];
        assert_eq!(find(&two, Some("add2")).unwrap(), "_Z4add2Pfj");
        assert_eq!(find(&two, Some("add(")).unwrap(), "_Z3addPfj");
        assert_eq!(find(&two, Some("_Z3addPfj")).unwrap(), "_Z3addPfj");
        for (wanted, error) in [
            (Some("add"), "several kernels have"),
            (Some("sub"), "no kernel has"),
            (None, "name one of them"),
        ] {
            let text = find(&two, wanted).unwrap_err().to_string();
            assert!(text.contains(error) && text.contains("add2(float*, unsigned int)"), "{text}");
        }
        assert_eq!(find(&["k"], None).unwrap(), "k");
    }
}
