//! Readable names of kernels, and kernels by a part of their name.

use anyhow::{Result, bail};
pub use epoxide_vgpu::readable_name as readable;

/// The kernel whose name is `wanted`, or else the only one whose name in the source is `wanted`, or
/// else the only one whose names contain it. Without `wanted`, the only kernel.
pub fn find(all: &[&str], wanted: Option<&str>) -> Result<String> {
    let Some(wanted) = wanted else {
        return match all {
            [] => bail!("the file has no kernel"),
            [one] => Ok((*one).to_owned()),
            _ => bail!("the file has several kernels, so name one of them:{}", list(all)),
        };
    };
    if all.contains(&wanted) {
        return Ok(wanted.to_owned());
    }
    let with = |fits: &dyn Fn(&str) -> bool| all.iter().copied().filter(|name| fits(name)).collect();
    let mut found: Vec<&str> = with(&|name| readable(name) == wanted);
    if found.is_empty() {
        found = with(&|name| readable(name).contains(wanted) || name.contains(wanted));
    }
    match found.as_slice() {
        [] => bail!("no kernel has '{wanted}' in its name; the file has:{}", list(all)),
        [one] => Ok((*one).to_owned()),
        _ => bail!("several kernels have '{wanted}' in their names:{}", list(&found)),
    }
}

/// A line for each name: that of the source, where no other kernel has it too.
fn list(names: &[&str]) -> String {
    let line = |name: &&str| {
        let shown = readable(name);
        let is_unique = names.iter().filter(|other| readable(other) == shown).count() == 1;
        format!("\n  {}", if is_unique { shown } else { (*name).to_owned() })
    };
    names.iter().map(line).collect()
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

    #[test]
    fn kernels_with_one_name_in_the_source_are_told_apart_by_their_mangled_names() {
        let two = ["_ZN1k4kern17h0123456789abcdefE", "_ZN1k4kern17hfedcba9876543210E", "other"];
        assert_eq!(find(&two, Some(two[1])).unwrap(), two[1]);
        let text = find(&two, Some("k::kern")).unwrap_err().to_string();
        let list = format!("\n  {}\n  {}", two[0], two[1]);
        assert_eq!(text, format!("several kernels have 'k::kern' in their names:{list}"));
        assert!(find(&two, None).unwrap_err().to_string().ends_with(&format!("{list}\n  other")));
    }
}
